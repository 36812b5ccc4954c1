"""What is decided of Ascend NPUs without vllm-ascend; `make test-ascend` runs with it (tests/ascend)."""

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from rollout_spec.config import ConfigError
from rollout_spec.verification import noise
from rollout_spec.vllm import ascend, versions
from tests import accelerator


@pytest.fixture
def installed(monkeypatch):
    def install(release, vllm):
        real = metadata.version

        def version(name):
            if name != "vllm-ascend":
                return real(name)
            if release is None:
                raise metadata.PackageNotFoundError(name)
            return release

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(versions, "version", lambda: vllm)

    return install


KNOWN = [(None, "0.29.0"), ("0.23.0", "0.23.0"), ("0.23.0.post1", "0.23.0"), ("0.24.0rc1+abc", "0.24.0")]
UNKNOWN = [("0.23.0", "0.24.0"), ("0.22.1rc1", "0.23.0"), ("0.26.0rc1", "0.26.0")]


@pytest.mark.parametrize(("release", "vllm"), KNOWN)
def test_a_pair_that_is_known_passes(installed, release, vllm):
    installed(release, vllm)
    ascend.refuse_unknown_pair()


@pytest.mark.parametrize(("release", "vllm"), UNKNOWN)
def test_another_pair_is_one_line_unless_it_knows_the_method(installed, release, vllm, tmp_path, monkeypatch):
    installed(release, vllm)
    with pytest.raises(ConfigError, match=rf"^vllm-ascend {release} with vllm {vllm} is not [^\n]*0\.24\.0$"):
        ascend.refuse_unknown_pair()
    (tmp_path / "vllm_ascend/spec_decode").mkdir(parents=True)
    (tmp_path / "vllm_ascend/__init__.py").touch()
    methods = tmp_path / "vllm_ascend/spec_decode/__init__.py"
    methods.write_text('if method == "suffix": ...')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm_ascend", raising=False)
    with pytest.raises(ConfigError):
        ascend.refuse_unknown_pair()
    methods.write_text('if method == "custom_class": ...')
    ascend.refuse_unknown_pair()


def test_npus_get_the_noise_of_the_host(monkeypatch):
    """Nothing is shifted there; the values are the host's, bit by bit, in one copy that nothing waits for."""
    monkeypatch.setattr(noise, "SHIFTS_SLOWLY", ("cuda",))
    seeds = noise.row_seeds([5, 6, 7], [1, 2, 3])
    expected = noise.exponential(seeds, 200, torch.device("cpu"))
    noise.check(SimpleNamespace(type="cuda"))
    with accelerator.Accelerator() as device:
        device.start()
        drawn = noise.exponential(seeds, 200, accelerator.DEVICE)
        assert (device.waits, device.num_sent, device.operations) == ([], 1, set())
    assert torch.equal(drawn.value, expected)

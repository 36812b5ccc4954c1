"""The laboratory's wheel."""

import shutil
import sys

from tests.distributions import IGNORED, ROOT, entry_points, packaged, run


def test_the_laboratorys_wheel_holds_its_own_package_and_nothing_else(tmp_path):
    tree = tmp_path / "lab"
    shutil.copytree(ROOT / "lab", tree, ignore=IGNORED)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, tree, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    expected = {
        str(file.relative_to(ROOT / "lab"))
        for file in (ROOT / "lab/rollout_spec_lab").rglob("*")
        if file.suffix in (".py", ".yaml", ".json")
    }
    assert any(name.startswith("rollout_spec_lab/configs/") for name in expected)
    assert packaged(wheel) == expected
    assert entry_points(wheel) == {
        ("verl.plugins", "rollout_spec_lab", "rollout_spec_lab.verl_plugin"),
        ("rollout_spec.devices", "roofline", "rollout_spec_lab.cli.simulate"),
        ("console_scripts", "rollout-spec-lab", "rollout_spec_lab.cli:main"),
    }

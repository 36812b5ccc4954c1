"""What a user gets: wheels and what they hold, commands and their parsers."""

import argparse
import configparser
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command, cwd, **environment):
    here = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # not the checkout
    given = {"cwd": cwd, "env": {**here, **environment}}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


IGNORED = shutil.ignore_patterns("__pycache__", "*.so", "_native.c", "*.egg-info", "build")


def said_of(wheel, file):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(f".dist-info/{file}"))
        return archive.read(name).decode()


def entry_points(wheel):
    parser = configparser.ConfigParser(delimiters="=")
    parser.read_string(said_of(wheel, "entry_points.txt"))
    return {(group, name, value) for group in parser.sections() for name, value in parser.items(group)}


def packaged(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def parsers(parser, name="rollout-spec"):
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, sub in action.choices.items():
                yield from parsers(sub, f"{name} {command}")


def check_parser(name, parser, whole):
    """Its arguments are in groups, there is `--json` where it prints figures, and one example that parses."""
    positional, optional, *_ = parser._action_groups
    outside = [a for group in (positional, optional) for a in group._group_actions]
    known = (argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction)
    assert all(isinstance(action, known) for action in outside), outside
    has_commands = any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
    assert has_commands or "--json" in parser._option_string_actions
    title, command = parser.epilog.splitlines()
    assert title == "example:" and f"{command} ".startswith(f"  {name} ")
    whole.parse_args(command.split()[1:])  # exits where it cannot

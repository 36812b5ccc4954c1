"""A page of HTML, with everything that it shows inside it."""

import base64
import io
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows; an empty row is a line
COLOURS = ("#8a94a3", "#1463d8")  # of lines without drafts and with


def render(
    command: str,
    headline: str,
    sentences: Iterable[str],
    tables: Iterable[Table],
    facts: Mapping[str, str],
    picture: bytes | None = None,
    alt: str = "",
    narrow: bytes | None = None,
) -> str:
    """What a command found, as a page. `facts`: with what it was made; `alt`: what `picture`, a PNG,
    shows; `narrow`: it for phones."""
    from jinja2 import Environment

    template = resources.files("rollout_spec.report").joinpath("page.html.j2").read_text()
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(
        command=command, headline=headline, sentences=sentences, tables=tables, facts=facts, alt=alt,
        picture=_text(picture), narrow=_text(narrow),
    )  # fmt: skip


def _text(picture: bytes | None) -> str:
    return base64.b64encode(picture or b"").decode()


def png(figure: Any, dpi: int) -> bytes:
    """A figure of matplotlib's as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": "rollout_spec"})
    return buffer.getvalue()

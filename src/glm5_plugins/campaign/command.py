"""The commands `glm5-plugins campaign` and `glm5-plugins compare`: check what they need, run, write the reports."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from glm5_plugins.errors import ConfigurationError

if TYPE_CHECKING:
    from glm5_plugins.campaign.report import Result

# Imported only by the commands that need them. They are an extra because no server needs them: psutil ends process
# trees, scipy has Student's t, matplotlib draws. SGLang itself brings the first two.
_EXTRA = ("psutil", "scipy", "matplotlib")


def need_extra(*modules: str) -> None:
    """Look for the extra's packages before hours are spent, not after.

    Raises:
        ConfigurationError: One is not installed.
    """
    for name in modules or _EXTRA:
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigurationError(
                f"A campaign needs {name}, which does not import here: {error}.",
                "pip install 'glm5-plugins[campaign]' (no server needs it).",
            ) from None


def run(path: Path, out: Path | None, *, retry_failed: bool, report_only: bool) -> Path:
    """Run a campaign, or what is left of it, and write its reports.

    Args:
        path: the plan; with `report_only` it may be the folder of a campaign instead.
        out: the campaign's folder; by default `<name>.campaign` beside the plan.
        retry_failed: whether what failed is tried again.
        report_only: whether nothing is run, and the reports are written anew.

    Returns:
        The campaign's folder.
    """
    need_extra()
    from glm5_plugins.campaign import plan as plans
    from glm5_plugins.campaign.report import load

    if report_only and out is None and path.is_dir():
        write_reports(load(path))
        return path
    plan = plans.read(path)
    folder = out or path.parent / f"{plan.name}.campaign"
    if not report_only:
        from glm5_plugins.campaign.run import Campaign

        try:
            Campaign(plan, folder, retry_failed=retry_failed).run()
        finally:  # an interrupt or a baseline that fails leaves a report of what there is
            if (folder / "campaign.json").exists() and (folder / "runs.jsonl").exists():
                write_reports(load(folder))
        return folder
    write_reports(load(folder))
    return folder


def write_reports(result: Result) -> None:
    """Write report.md and report.html into the campaign's folder."""
    from glm5_plugins.campaign.page import html
    from glm5_plugins.campaign.plots import draw
    from glm5_plugins.campaign.report import build, markdown

    report = build(result)
    for name, text in (("report.md", markdown(report)), ("report.html", html(report, draw(result)))):
        new = result.folder / f".{name}.new"
        new.write_text(text, encoding="utf-8")
        os.replace(new, result.folder / name)

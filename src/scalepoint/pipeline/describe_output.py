"""Writes the files that describe an output folder: README.md (model card), use.py and bom.cdx.json.

Files of these names that scalepoint did not write, or that were edited since, stay as they are.
"""

from scalepoint.pipeline.bill_of_materials import build_bill_of_materials
from scalepoint.pipeline.context import StageContext
from scalepoint.pipeline.model_card import build_model_card
from scalepoint.pipeline.result import Trial
from scalepoint.pipeline.use_script import build_use_script
from scalepoint.pipeline.workspace import BOM_FILE, CARD_FILE, USE_FILE
from scalepoint.report import Report
from scalepoint.verification.simulation import build_feeds


def write_description_files(context: StageContext, best: Trial, report: Report) -> None:
    """Write use.py if the runtime has one, then the model card, then the bill of materials, which lists the others."""
    job, workspace = context.job, context.workspace
    feeds, runtime, file = build_feeds(best.model, job.example), job.target.runtime, best.path.name
    script = build_use_script(runtime, file, feeds)
    if script is not None:
        workspace.write_unless_foreign(USE_FILE, script)
    names = (*workspace.hashes(), BOM_FILE)
    workspace.write_unless_foreign(CARD_FILE, build_model_card(report, file, runtime, feeds, job.metadata, names))
    workspace.write_unless_foreign(BOM_FILE, build_bill_of_materials(report, file, feeds, workspace.hashes()))

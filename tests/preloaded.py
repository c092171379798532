"""What processes that are forked for a test have loaded before: see `forked`."""

import contextlib
import gc
import importlib

from castwise.report import _page

for name in (
    "torch._dynamo",  # which torch imports when the first optimizer is made
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.distributed.tensor.parallel",
    "castwise.checking",
    "castwise.cpu",
    "castwise.cuda",
    "castwise.policies",
    "castwise.schedules",
    "castwise._cli.report_text",
    "castwise._cli.script",
    "castwise._demo.command",
    "castwise.monitor._monitor",
    "castwise.report._html_report",
    "rich.progress",
):
    importlib.import_module(name)
with contextlib.suppress(ImportError):
    importlib.import_module("typer._adapters")  # which loads pydantic as soon as an option is read
_page.environment().get_template("report.html.j2")
_page.in_page(_page.load_plotly())
gc.collect()
gc.freeze()  # castwise looks for models among all objects but these

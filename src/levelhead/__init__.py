"""levelhead: attention that trains well, and the numbers that prove it.

This page is the whole public surface in one view; each name is loaded when it is first used, so
that `import levelhead` itself loads none of the heavy libraries.

>>> import levelhead
>>> levelhead.Reading("mse", 0.37).value
0.37
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - in groups, in the order in which one meets them
    # forecasting: a table in, a forecast with its uncertainty out, beside the straight line
    "SAMformer",
    "SAMformerRegressor",
    "forecast",
    "backtest",
    "bench",
    "demo",
    # data: a user's table, read and checked
    "read_table",
    "Table",
    # analysis: the heads of any checkpoint, in numbers that do not depend on the basis
    "inspect",
    "compare",
    "AttentionView",
    # networks: the bare modules, for a loop of your own
    "SAMformerNet",
    "ReversibleNorm",
    "remove_sigma_reparam",
    "sigma_reparam",
    # training: towards flat minima, and any loop of your own watched
    "SAM",
    "TrainingSettings",
    "train",
    "watch",
    # records: what a command leaves behind, and the page that shows it
    "Run",
    "Reading",
    "Figure",
    "report",
    # errors: every one the package raises on purpose
    "LevelheadError",
    "LevelheadWarning",
]

if TYPE_CHECKING:
    from levelhead.base.errors import LevelheadError, LevelheadWarning
    from levelhead.base.records import Figure, Reading, Run
    from levelhead.data.tables import Table, read_table
    from levelhead.forecasting.backtest import backtest
    from levelhead.forecasting.bench import bench
    from levelhead.forecasting.commands import demo, forecast
    from levelhead.forecasting.forecaster import SAMformer
    from levelhead.forecasting.regressor import SAMformerRegressor
    from levelhead.inspection.compare import compare
    from levelhead.inspection.inspect import inspect
    from levelhead.nn.reversible_norm import ReversibleNorm
    from levelhead.nn.samformer import SAMformerNet
    from levelhead.nn.sigma_reparam import remove_sigma_reparam, sigma_reparam
    from levelhead.report.document import write_report as report
    from levelhead.training.loop import TrainingSettings, train
    from levelhead.training.sam import SAM
    from levelhead.training.watch import watch
    from levelhead.weights.attention_view import AttentionView

_HOME = {
    "SAMformer": "forecasting.forecaster",
    "SAMformerRegressor": "forecasting.regressor",
    "forecast": "forecasting.commands",
    "backtest": "forecasting.backtest",
    "bench": "forecasting.bench",
    "demo": "forecasting.commands",
    "read_table": "data.tables",
    "Table": "data.tables",
    "inspect": "inspection.inspect",
    "compare": "inspection.compare",
    "AttentionView": "weights.attention_view",
    "SAMformerNet": "nn.samformer",
    "ReversibleNorm": "nn.reversible_norm",
    "remove_sigma_reparam": "nn.sigma_reparam",
    "sigma_reparam": "nn.sigma_reparam",
    "SAM": "training.sam",
    "TrainingSettings": "training.loop",
    "train": "training.loop",
    "watch": "training.watch",
    "Run": "base.records",
    "Reading": "base.records",
    "Figure": "base.records",
    "LevelheadError": "base.errors",
    "LevelheadWarning": "base.errors",
}


def __getattr__(name: str) -> Any:
    if name == "report":  # a folder and a function: calling the folder writes a report
        return import_module("levelhead.report")
    if name not in _HOME:
        raise AttributeError(f"module 'levelhead' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"levelhead.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

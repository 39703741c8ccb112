"""Ready callbacks for ``on_event``: log lines, JSON lines, TensorBoard, Prometheus. No torch."""

from __future__ import annotations

from moc.metrics.figures import PrometheusTextfileSink, TensorBoardSink
from moc.metrics.sinks import JsonlSink, LoggingSink, fan_out

__all__ = ["JsonlSink", "LoggingSink", "PrometheusTextfileSink", "TensorBoardSink", "fan_out"]

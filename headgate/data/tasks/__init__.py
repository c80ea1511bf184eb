"""Synthetic tasks, one file each; `headgate prepare NAME:option=value,... OUT` writes one as token shards."""

from headgate.data.tasks.contract import TASKS, DrawnTask, Samples, SyntheticTask, parse_task, register_task
from headgate.data.tasks.draws import Draws

__all__ = ["TASKS", "DrawnTask", "Draws", "Samples", "SyntheticTask", "parse_task", "register_task"]

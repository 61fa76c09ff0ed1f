"""The doctor: checks a target, a drafter and data against each other and explains what it finds."""

from outrider.evaluation.doctor.case import Case, read_data, read_drafter
from outrider.evaluation.doctor.finding import Finding, Result
from outrider.evaluation.doctor.report import as_json, print_report, verdict
from outrider.evaluation.doctor.run import CHECKS, examine

__all__ = [
    "CHECKS",
    "Case",
    "Finding",
    "Result",
    "as_json",
    "examine",
    "print_report",
    "read_data",
    "read_drafter",
    "verdict",
]

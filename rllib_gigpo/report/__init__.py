"""The report of a run: one HTML file, or the same page served while the run goes on.

Only JSON, JSON lines and Parquet are read, so a stranger's run folder can do no harm; whatever a
model or an environment wrote reaches the page as text, never as markup.
"""

from rllib_gigpo.report.build import report_html, write_report
from rllib_gigpo.report.server import RunServer

__all__ = ["RunServer", "report_html", "write_report"]

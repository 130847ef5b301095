"""What can be known of a run before it costs GPU hours: `rllib-gigpo check CONFIG`."""

from rllib_gigpo.check.findings import Finding
from rllib_gigpo.check.run import check

__all__ = ["Finding", "check"]

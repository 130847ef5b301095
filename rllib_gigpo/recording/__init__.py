"""The run folder: what every training run leaves behind, and the callback that writes it."""

from rllib_gigpo.recording.folder import RunFolder
from rllib_gigpo.recording.receipt import Costs, receipt_of, receipt_text

__all__ = ["Costs", "RunFolder", "receipt_of", "receipt_text"]

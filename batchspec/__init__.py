"""batchspec: offline batch generation that speculates only where it is measured to pay."""

__version__ = "0.1.0"

"""Python imports this first in every process of a server. On SIGUSR2 the process writes the stacks of its threads to its log."""

import faulthandler
import signal

faulthandler.register(signal.SIGUSR2, all_threads=True)

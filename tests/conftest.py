"""For every test: a run that was started in the background ignores Ctrl-C, and so would each process it starts."""

import signal


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

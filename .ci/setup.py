"""Entry point of ``make setup``. Old Pythons must be able to parse this file: it says so."""

import sys

MINIMUM = (3, 11)


def complaint(version, executable):
    """One line when the Python of this version is too old for the project, else an empty string."""
    if tuple(version[:2]) >= MINIMUM:
        return ""
    return (
        "samebytes: Python %d.%d is too old in %s: 3.11 or newer is needed; "  # noqa: UP031
        "install one and run: make setup PYTHON=/path/to/python3.11" % (version[0], version[1], executable)
    )


if __name__ == "__main__":
    LINE = complaint(sys.version_info, sys.executable)
    if LINE:
        sys.stderr.write(LINE + "\n")
        sys.exit(64)
    import signal

    import environment

    # A stopped set-up cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(environment.main(sys.argv[1:]))

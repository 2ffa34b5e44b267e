"""What the tests of causes share: recorders that end together, and the one cause that a report names."""

from concurrent.futures import ThreadPoolExecutor


def close(recorders):
    """Closes the recorders of all ranks at once: each waits for the others."""
    with ThreadPoolExecutor(len(recorders)) as pool:
        list(pool.map(lambda recorder: recorder.close(), recorders))


def named(report, cause):
    """The parameters of the one cause of a divergence, which must be this one."""
    assert report.verdict == "diverged", report
    assert [found.id for found in report.causes] == [cause], report.json["causes"]
    return report.json["causes"][0]["parameters"]

import time
def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed:
        text = str(report.longrepr).strip().splitlines() if report.failed else []
        with open("/tmp/insta.txt", "a") as f:
            f.write(f"{report.outcome} {report.duration:.1f} {report.nodeid.split('::',1)[1]} {' | '.join(text[-3:])[:300]}\n")

from sizewise.report.progress import Progress
from sizewise.runs.folder import Totals


def test_without_a_terminal_each_round_is_a_line(capsys):
    with Progress(3, seconds=0) as bar:
        bar.update({"round": 1}, Totals(rounds=1, bytes_up=1000))
        bar.update({"round": 2}, Totals(rounds=2, accuracy=0.5, peak_bytes={"a": 3_000_000}))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "round 1 of 3: sent 1 kB\nround 2 of 3: accuracy 50.0%, sent 0 B, peak 3 MB\n"
    )


def test_progress_shows_accuracy_bytes_and_peak(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    totals = Totals(rounds=2, accuracy=0.75, bytes_up=2_000_000, peak_bytes={"a": 3_000_000})
    with Progress(3) as bar:
        bar.update({"round": 2}, totals)
    shown = capsys.readouterr()
    assert shown.out == ""
    for word in ("2/3", "accuracy 75.0%", "sent 2 MB", "peak 3 MB"):
        assert word in shown.err


def test_short_rounds_have_a_line_every_few_seconds_and_the_last_one(capsys, monkeypatch):
    clock = iter([10.0, 11.0, 12.5, 13.0, 13.5])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with Progress(5, seconds=2) as bar:
        monkeypatch.setattr(bar._bar, "update", lambda *_, **__: None)  # It has a clock, too.
        for number in range(1, 6):
            bar.update({"round": number}, Totals(rounds=number))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" of")[0] for line in lines] == ["round 1", "round 3", "round 5"]

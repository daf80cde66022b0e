"""`moefold train` with all sites on this machine, and `moefold meet`."""

import pytest

from tests.e2e.command import losses, metrics, moefold, small, train

pytestmark = pytest.mark.e2e

SITES = ("sites.count=2", "sites.every=2", "run.steps=4", "checkpoint.every=4")


def test_one_command_trains_all_sites_and_finds_them_finished(tmp_path):
    run_dir = tmp_path / "run"
    done = train(run_dir, *SITES)
    assert "site 0: step 4/4" in done.stdout
    assert "site 1: done: 4 steps" in done.stdout
    assert "meeting point: all 2 sites are here" in done.stdout
    assert "given before it" not in done.stdout
    assert done.stderr == ""
    rounds = [[record["sites"] for record in metrics(run_dir / f"site-{n}")] for n in (0, 1)]
    assert [round_ and round_["members"] for round_ in rounds[0]] == [None, 2, None, 2]
    # The sites read other samples, and send the same differences.
    assert losses(run_dir / "site-0")[0] != losses(run_dir / "site-1")[0]
    assert rounds[0][1]["sent_bytes"] == rounds[1][1]["sent_bytes"] > 0
    again = train(run_dir, *SITES)
    assert again.stdout.count("has all 4 steps of run.steps; nothing to do") == 2
    shown = moefold("checkpoint", "compare", *(str(run_dir / f"site-{n}") for n in (0, 1)))
    assert "model." not in shown.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["meet", "--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines, and there is no shared"),
        (["meet", "--port", "70000"], "--port 70000 must lie in [0, 65535]"),
        (["meet", "--secret", "no-such-file"], "--secret='no-such-file' cannot be read"),
    ],
)
def test_meeting_point_refuses_wrong_options(words, message):
    refused = moefold(*words)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_site_without_a_secret_refuses_another_machine(tmp_path):
    words = small(tmp_path / "run", *SITES, "sites.number=0", "sites.meet=10.1.2.3:29600")
    refused = moefold(*words)
    assert refused.returncode == 2
    assert "sites.meet='10.1.2.3:29600' is another machine, and there is no shared secret" in refused.stderr

"""Communication hides behind the backward pass: gradients are sent before the last is computed."""

from surfaces import check_surfaces


def test_gradients_of_the_top_travel_while_those_below_are_computed(clusters, tmp_path):
    """The backward pass waits below the top layer until the sums of that have arrived."""
    job = clusters.run("overlap", str(tmp_path), "1", str(1 << 40), workers=2)
    assert job.status == 0
    results = job.results(0)
    assert min(results[f"{tmp_path}/1"]) > 0
    assert set(results[f"{tmp_path}/{1 << 40}"]) == {0}
    check_surfaces(tmp_path / "1")  # with hidden communication

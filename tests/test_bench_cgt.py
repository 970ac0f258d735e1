"""The benchmarks of contexts run, and report what they say they do."""

from cgt_study import speed


def test_benchmarks_at_a_tiny_size():
    cost = speed.modulation_cost(16, tokens=32, templates=2, rounds=2)
    assert cost["ratio"] > 0
    assert cost["reference_ratio"] > 0
    found = speed.specialized_speed(64, 3, tokens=24, vocabulary=40, rounds=2)
    assert set(found) == {"stock", "specialized", "frozen", "dynamic"}
    assert found["stock"]["speed"] == 1.0
    (row,) = speed.prefix_cost(64, 3, prefixes=(8,), query=4, vocabulary=40, rounds=2)
    # 3 layers of x and 2 of y, keys and values, 8 tokens, 4 bytes
    assert row["cache_bytes"] == 2 * 8 * 4 * (3 * 64 + 2 * 128)
    assert -10 < row["query_saved"] < 1

from hypothesis import given, strategies as st

from thrifty.perf import SlicingCosts


def layer(**changes):
    shape = {
        "parts": 4,
        "rows": 64,
        "inputs": 2048,
        "outputs": 2048,
        "inputs_kept": 1024,
        "outputs_kept": 1024,
    }
    return shape | changes


def test_larger_parts_pay_sooner_and_more_parts_later():
    costs = SlicingCosts()
    assert costs.pays(**layer())
    assert not costs.pays(**layer(parts=64, rows=4))
    assert not costs.pays(**layer(inputs_kept=2048, outputs_kept=2048))


@given(st.integers(1, 64), st.integers(1, 512), st.integers(1, 32), st.integers(1, 32))
def test_what_pays_pays_for_less_too(parts, rows, kept_in, kept_out):
    """Whoever keeps fewer units never pays more."""
    costs = SlicingCosts()
    shape = {"parts": parts, "rows": rows, "inputs": 2048, "outputs": 2048}
    if costs.pays(**shape, inputs_kept=64 * kept_in, outputs_kept=64 * kept_out):
        assert costs.pays(**shape, inputs_kept=32 * kept_in, outputs_kept=64 * kept_out)
        assert costs.pays(**shape, inputs_kept=64 * kept_in, outputs_kept=32 * kept_out)


def test_where_memory_is_free_fewer_operations_always_pay():
    costs = SlicingCosts(flops_per_byte=0.0, half_rows=0.0, margin=1.0)
    assert costs.pays(**layer(parts=1000, rows=1))


def test_a_margin_wants_more():
    assert not SlicingCosts(margin=10.0).pays(**layer())

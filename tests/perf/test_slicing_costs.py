from hypothesis import given, strategies as st

from thrifty.perf import SlicedProduct, SlicingCosts, SlicingKernelCosts


def product(**changes):
    shape = {"parts": 4, "rows": 64, "inputs": 2048, "outputs": 2048}
    return SlicedProduct(**shape | {"inputs_kept": 1024, "outputs_kept": 1024} | changes)


def test_larger_parts_pay_sooner_and_more_parts_later():
    costs = SlicingCosts()
    assert costs.pays(product())
    assert not costs.pays(product(parts=64, rows=4))
    assert not costs.pays(product(inputs_kept=2048, outputs_kept=2048))


@given(st.integers(1, 64), st.integers(1, 512), st.integers(1, 32), st.integers(1, 32))
def test_whoever_keeps_less_needs_less(parts, rows, kept_in, kept_out):
    costs = SlicingCosts()

    def share(left_in, left_out):
        return costs.share(
            product(parts=parts, rows=rows, inputs_kept=left_in, outputs_kept=left_out)
        )

    whole = share(64 * kept_in, 64 * kept_out)
    assert share(32 * kept_in, 64 * kept_out) < whole
    assert share(64 * kept_in, 32 * kept_out) < whole


def test_where_memory_is_free_the_share_is_that_of_the_operations():
    costs = SlicingCosts(flops_per_byte=0.0, half_rows=0.0)
    assert costs.share(product(parts=1000, rows=1)) == 0.25


def test_a_margin_wants_more():
    assert not SlicingCosts(margin=10.0).pays(product())


def test_kernels_slice_wide_layers_and_mask_small_nets():
    costs = SlicingKernelCosts(overhead=5e8)  # as in a CUDA graph
    eager = SlicingKernelCosts()
    wide = {"inputs": 4096, "outputs": 4096, "inputs_kept": 2048, "outputs_kept": 2048}
    for parts in (1, 4, 8, 16):
        assert costs.pays(SlicedProduct(parts=parts, rows=256 // parts, **wide))
        # There, the launches that slicing adds take longer than what it saves.
        assert not eager.pays(SlicedProduct(parts=parts, rows=256 // parts, **wide))
        assert not eager.pays(product(parts=parts, rows=256 // parts))
    assert eager.pays(SlicedProduct(parts=8, rows=256, **wide))
    small = {"inputs": 256, "outputs": 256, "inputs_kept": 128, "outputs_kept": 128}
    assert not costs.pays(SlicedProduct(parts=4, rows=64, **small))
    # Tiles have 16 rows, so parts of a few rows pay less.
    assert costs.share(product(parts=256, rows=1)) > costs.share(product(parts=16, rows=16))

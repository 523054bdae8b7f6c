"""Training functions of one's own, which suggest values and yield their metrics."""

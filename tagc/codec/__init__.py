"""The papers in plain PyTorch: pure functions, tensors in and tensors out. This is the reference backend.

Shape letters used throughout: W ranks (destinations), N elements of one shard, R rows and L lanes of the shard's
``row x lane`` arrangement, H = 3 hash rows, C cells per hash row, K rows that share one cell.
"""

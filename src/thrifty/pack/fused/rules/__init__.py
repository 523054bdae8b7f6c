"""Rules for what torch functions do to packed tensors, one file for each kind of function.

Importing this package registers them.
"""

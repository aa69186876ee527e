"""What runs on the host. Standard library and kdtree_patch only; it travels as a zip on standard input, and a Python
that belongs to root runs it. Nothing of it stays there.
"""

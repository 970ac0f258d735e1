"""The base of all packages: the machine, atomic files, the C library's allocator."""

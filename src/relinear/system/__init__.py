"""The base of all rooms: machine, atomic files, locks, folders of results, the C library's allocator."""

"""What lies below every room: the machine, atomic files, the C library's allocator."""

"""What every other package builds on: machine facts, atomic files, locks, run folders, the C library's allocator."""

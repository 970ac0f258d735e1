/* Counts the calls of a process on files below a folder, and lets the n-th fail: as on a full or a failing disk.
 *
 * Preloaded; what it is to do is said by faults_arm. A disk that is full takes half of the write at which it becomes so.
 * Who has called faults_each is asked at each call whether it is to fail; what it does meanwhile is not counted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX], failed[1 << 16], noted[1 << 22];
static size_t noted_length;
static long seen, writes, fatal;
static int error_number, lasting, reads_too, asking;
static int (*each)(long);

void faults_arm(const char *below, long number, int error, int stays, int reads) {
    strncpy(folder, below, PATH_MAX - 1);
    seen = writes = 0, fatal = number, error_number = error, lasting = stays, reads_too = reads, failed[0] = 0;
    noted[0] = 0, noted_length = 0;
}
void faults_each(int (*ask)(long)) { each = ask; }
const char *faults_failed(void) { return failed; }
const char *faults_noted(void) { return noted; }  /* all, where none is to fail: "1 read PATH" */

/* 1 where the call is the one to fail, or one after it on a disk that stays full. */
static int fails_at(const char *call, const char *path, int reads) {
    if (!folder[0] || asking || strncmp(path, folder, strlen(folder))) return 0;
    seen++, writes += !reads;
    if (!fatal && noted_length < sizeof noted - 2 * PATH_MAX)
        noted_length += snprintf(noted + noted_length, 2 * PATH_MAX, "%d %s %s\n", reads, call, path);
    long number = reads_too ? seen : writes;
    if (each && (!reads || reads_too)) {
        asking = 1;
        if (each(number)) fatal = number, each = NULL;
        asking = 0;
    }
    if (!fatal || (reads && !reads_too) || number < fatal || (number > fatal && !lasting)) return 0;
    size_t told = strlen(failed);
    snprintf(failed + told, sizeof failed - told, "%s %s\n", call, path);
    errno = error_number;
    return 1;
}

static int fails(const char *call, int at, const char *path, int reads) {
    char whole[2 * PATH_MAX] = "", link[64];
    if (!folder[0]) return 0;
    if (!path || path[0] != '/') {
        if (at == AT_FDCWD) { if (!getcwd(whole, PATH_MAX)) return 0; }
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t length = readlink(link, whole, PATH_MAX - 1);
            if (length < 0) return 0;
            whole[length] = 0;
        }
        if (path) { strncat(whole, "/", PATH_MAX); strncat(whole, path, PATH_MAX - 1); }
    } else strncpy(whole, path, PATH_MAX - 1);
    return fails_at(call, whole, reads);
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

int open(const char *path, int flags, ...) { MODE(flags) REAL(open); return fails("open", AT_FDCWD, path, !(flags & O_CREAT)) ? -1 : real(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) REAL(open64); return fails("open", AT_FDCWD, path, !(flags & O_CREAT)) ? -1 : real(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) REAL(openat); return fails("open", at, path, !(flags & O_CREAT)) ? -1 : real(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) REAL(openat64); return fails("open", at, path, !(flags & O_CREAT)) ? -1 : real(at, path, flags, mode); }
FILE *fopen(const char *path, const char *mode) { REAL(fopen); return fails("open", AT_FDCWD, path, mode[0] == 'r') ? NULL : real(path, mode); }
FILE *fopen64(const char *path, const char *mode) { REAL(fopen64); return fails("open", AT_FDCWD, path, mode[0] == 'r') ? NULL : real(path, mode); }

/* the write at which a disk becomes full */
#define HALF(count) (error_number == ENOSPC && writes == fatal && (count) > 1)
ssize_t write(int fd, const void *data, size_t count) { REAL(write); return !fails("write", fd, NULL, 0) ? real(fd, data, count) : HALF(count) ? real(fd, data, count / 2) : -1; }
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) { REAL(pwrite); return fails("write", fd, NULL, 0) ? -1 : real(fd, data, count, at); }
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) { REAL(pwrite64); return fails("write", fd, NULL, 0) ? -1 : real(fd, data, count, at); }
ssize_t writev(int fd, const struct iovec *parts, int count) { REAL(writev); return fails("write", fd, NULL, 0) ? -1 : real(fd, parts, count); }
ssize_t read(int fd, void *data, size_t count) { REAL(read); return fails("read", fd, NULL, 1) ? -1 : real(fd, data, count); }
ssize_t pread(int fd, void *data, size_t count, off_t at) { REAL(pread); return fails("read", fd, NULL, 1) ? -1 : real(fd, data, count, at); }
ssize_t pread64(int fd, void *data, size_t count, off64_t at) { REAL(pread64); return fails("read", fd, NULL, 1) ? -1 : real(fd, data, count, at); }
int fsync(int fd) { REAL(fsync); return fails("fsync", fd, NULL, 0) ? -1 : real(fd); }
int fdatasync(int fd) { REAL(fdatasync); return fails("fsync", fd, NULL, 0) ? -1 : real(fd); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); return fails("truncate", fd, NULL, 1) ? -1 : real(fd, size); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return fails("mkdir", AT_FDCWD, path, 0) ? -1 : real(path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { REAL(mkdirat); return fails("mkdir", at, path, 0) ? -1 : real(at, path, mode); }
int symlink(const char *to, const char *path) { REAL(symlink); return fails("symlink", AT_FDCWD, path, 0) ? -1 : real(to, path); }
int rename(const char *from, const char *to) { REAL(rename); return fails("rename", AT_FDCWD, to, 0) ? -1 : real(from, to); }
int renameat(int one, const char *from, int two, const char *to) { REAL(renameat); return fails("rename", two, to, 0) ? -1 : real(one, from, two, to); }
int renameat2(int one, const char *from, int two, const char *to, unsigned how) { REAL(renameat2); return fails("rename", two, to, 0) ? -1 : real(one, from, two, to, how); }
int unlink(const char *path) { REAL(unlink); return fails("unlink", AT_FDCWD, path, 1) ? -1 : real(path); }
int unlinkat(int at, const char *path, int flags) { REAL(unlinkat); return fails("unlink", at, path, 1) ? -1 : real(at, path, flags); }
int rmdir(const char *path) { REAL(rmdir); return fails("rmdir", AT_FDCWD, path, 1) ? -1 : real(path); }

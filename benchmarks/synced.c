/* Preloaded into a command, appends "INODE SIZE" to the file $SYNCED_LOG for every file that it syncs to the disk. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int recorded(int file, long result) {
  int error = errno;
  const char *path = getenv("SYNCED_LOG");
  struct stat about;
  if (!result && path && !fstat(file, &about)) {
    char line[64];
    int size = snprintf(line, sizeof line, "%llu %lld\n", (unsigned long long)about.st_ino, (long long)about.st_size);
    int log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (log < 0 || write(log, line, size) != size) abort();
    close(log);
  }
  errno = error;
  return (int)result;
}

int fsync(int file) { return recorded(file, syscall(SYS_fsync, file)); }
int fdatasync(int file) { return recorded(file, syscall(SYS_fdatasync, file)); }

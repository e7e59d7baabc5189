/* Preloaded into a command, sets its clock back by a day when CLOCK_MONOTONIC is at $CLOCK_BACK_AT, in seconds. Each process appends
   "PID" to the file $CLOCK_LOG when it first reads the earlier time. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double steady(void) {
  struct timespec now;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

static void tell(void) {
  static int told;
  const char *path = getenv("CLOCK_LOG");
  char line[32];
  if (!path || told == getpid()) return;
  told = getpid();
  int size = snprintf(line, sizeof line, "%d\n", told);
  int log = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (log < 0 || write(log, line, size) != size) abort();
  close(log);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = (int)syscall(SYS_clock_gettime, clock, now);
  const char *at = getenv("CLOCK_BACK_AT");
  if (!result && clock == CLOCK_REALTIME && at && steady() > atof(at)) {
    now->tv_sec -= 86400;
    tell();
  }
  return result;
}

struct moment { long seconds, microseconds; };

int gettimeofday(struct moment *now, void *zone) {
  struct timespec time;
  int result = clock_gettime(CLOCK_REALTIME, &time);
  now->seconds = time.tv_sec;
  now->microseconds = time.tv_nsec / 1000;
  return result;
}

time_t time(time_t *now) {
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  if (now) *now = time.tv_sec;
  return time.tv_sec;
}

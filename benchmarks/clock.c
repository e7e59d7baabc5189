/* Preloaded into a command, sets its clock back by a day $CLOCK_BACK_AFTER seconds after the first look at it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long steady(void) {
  struct timespec now;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static long begin;
  int result = (int)syscall(SYS_clock_gettime, clock, now);
  const char *after = getenv("CLOCK_BACK_AFTER");
  if (!begin) begin = steady();
  if (!result && clock == CLOCK_REALTIME && after && steady() - begin > 1000 * atof(after)) now->tv_sec -= 86400;
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

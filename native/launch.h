/* Building an environment from a list of steps: launch.c, which describes them, and the files that execute them. */
#ifndef SKERRY_LAUNCH_H
#define SKERRY_LAUNCH_H

#include "skerry.h"

enum { SK_ARGS_MAX = 96, SK_SLOTS_MAX = 64 };

struct sk_cursor { /* a step, and where the next one begins */
    size_t at;
    int argc;
    char *argv[SK_ARGS_MAX + 1]; /* NULL behind the last */
};

/* ---- steps.c: the daemon's messages, and the answers ---- */

extern int sk_control_fd;
extern int sk_slots[SK_SLOTS_MAX];

void sk_tell_daemon(const char *message);
void sk_complain(char kind, const char *step, const char *detail); /* 'W': done in part; 'E': failed; with errno */
_Noreturn void sk_fail(const char *step, const char *detail);
long sk_check(long result, const char *step, const char *detail); /* fails if it is negative */
void sk_receive_steps(void);                                      /* the next message replaces the one before */
void sk_take_steps(int argc, char **argv); /* each after "--" */
void sk_load_steps(const void *data, size_t len);
void sk_answer_lines(int fd); /* the answers are lines from now on */
bool sk_next_step(struct sk_cursor *c);
bool sk_is_step(const struct sk_cursor *c, const char *name, int arguments); /* fails for another number of them */
long sk_number(const char *step, const char *text);
int sk_slot(const char *step, const char *text);

/* ---- launch.c ---- */

int sk_listen(const char *step, const char *path); /* a new socket there */
void sk_write(const char *path, const char *text);
void sk_wait_for_the_last_word(void);
int sk_become_init(void); /* executes the steps, becomes the guest; its exit status */

/* ---- machine.c ---- */

void sk_serve_step(const struct sk_cursor *c);
_Noreturn void sk_become_machine(const struct sk_cursor *c);

/* ---- boot.c ---- */

void sk_load_modules(const char *directory); /* DIRECTORY/00 and so on */

/* ---- mounts.c, privileges.c: execute the step, if it is one of theirs ---- */

bool sk_mount_step(const struct sk_cursor *c);
bool sk_privilege_step(const struct sk_cursor *c, bool rootful);
void sk_join_later(const char *tasks); /* opens a v1 cgroup's `tasks` for the step `join` */

#endif

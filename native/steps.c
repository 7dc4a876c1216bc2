/* The lists of steps that the daemon sends, and the answers to it: see launch.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "launch.h"

enum { STEPS_MAX = 128 * 1024 };

static char steps[STEPS_MAX];
static size_t steps_len;
static bool by_line;
int sk_control_fd = 0;
int sk_slots[SK_SLOTS_MAX];

void sk_tell_daemon(const char *message)
{
    /* A daemon that is gone does not hear it; the next message that does not come ends us. */
    if (by_line)
        dprintf(sk_control_fd, "%s\n", message);
    else
        (void)send(sk_control_fd, message, strlen(message), MSG_NOSIGNAL);
}

void sk_complain(char kind, const char *step, const char *detail)
{
    char message[512];
    snprintf(message, sizeof message, "%c\t%s\t%d\t%s", kind, step, errno, detail);
    sk_tell_daemon(message);
}

_Noreturn void sk_fail(const char *step, const char *detail)
{
    sk_complain('E', step, detail);
    _exit(1);
}

long sk_check(long result, const char *step, const char *detail)
{
    if (result < 0)
        sk_fail(step, detail);
    return result;
}

/* The end of the stream of messages is the end of this process. */
void sk_receive_steps(void)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof sk_slots)];
    } ancillary;
    struct iovec data = { .iov_base = steps, .iov_len = sizeof steps };
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary
    };
    ssize_t n;
    do
        n = recvmsg(sk_control_fd, &message, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n == 0)
        _exit(1);
    sk_check(n, "receive", "");
    errno = EMSGSIZE;
    if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
        sk_fail("receive", "too much at once");
    steps_len = (size_t)n;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)
        memcpy(sk_slots, CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
}

void sk_answer_lines(int fd)
{
    sk_control_fd = fd;
    by_line = true;
}

void sk_load_steps(const void *data, size_t len)
{
    errno = EMSGSIZE;
    if (len > sizeof steps)
        sk_fail("steps", "too long");
    memcpy(steps, data, len);
    steps_len = len;
}

/* Writes them as they would have come from the daemon. */
void sk_take_steps(int argc, char **argv)
{
    for (int i = 0; i < argc; i++) {
        int count = 0;
        errno = EINVAL;
        if (strcmp(argv[i], "--") != 0)
            sk_fail("steps", argv[i]);
        while (i + 1 + count < argc && strcmp(argv[i + 1 + count], "--") != 0)
            count++;
        errno = E2BIG;
        if (count > SK_ARGS_MAX || sizeof steps - steps_len < 2)
            sk_fail("steps", "number of arguments");
        steps[steps_len++] = (char)count;
        steps[steps_len++] = 0;
        for (; count > 0; count--) {
            size_t len = strlen(argv[++i]) + 1;
            if (len > sizeof steps - steps_len)
                sk_fail("steps", "too long");
            memcpy(steps + steps_len, argv[i], len);
            steps_len += len;
        }
    }
}

bool sk_next_step(struct sk_cursor *c)
{
    if (c->at == steps_len)
        return false;
    errno = EINVAL;
    if (steps_len - c->at < 2)
        sk_fail("steps", "truncated");
    c->argc = sk_get16((uint8_t *)steps + c->at);
    c->at += 2;
    if (c->argc < 1 || c->argc > SK_ARGS_MAX)
        sk_fail("steps", "number of arguments");
    for (int i = 0; i < c->argc; i++) {
        char *end = memchr(steps + c->at, 0, steps_len - c->at);
        if (end == NULL)
            sk_fail("steps", "unterminated argument");
        c->argv[i] = steps + c->at;
        c->at = (size_t)(end - steps) + 1;
    }
    c->argv[c->argc] = NULL;
    return true;
}

bool sk_is_step(const struct sk_cursor *c, const char *name, int arguments)
{
    if (strcmp(c->argv[0], name) != 0)
        return false;
    errno = EINVAL;
    if (c->argc != arguments + 1)
        sk_fail(name, "number of arguments");
    return true;
}

long sk_number(const char *step, const char *text)
{
    char *end;
    errno = EINVAL;
    long value = strtol(text, &end, 0);
    if (*text == 0 || *end != 0)
        sk_fail(step, text);
    return value;
}

int sk_slot(const char *step, const char *text)
{
    long n = sk_number(step, text);
    errno = EINVAL;
    if (n < 0 || n >= SK_SLOTS_MAX)
        sk_fail(step, "slot out of range");
    return (int)n;
}

/* Starting executions: the request, the pipes or the terminal, and the supervisor. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

#include "process.h"

int sk_high(int fd)
{
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, 32);
    close(fd);
    return moved;
}

static void close_all(int *fds, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

static int open_terminal(const struct sk_start *start, int *theirs)
{
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC), unlocked = 0;
    char path[32];
    unsigned number;
    struct winsize size = { .ws_row = start->rows, .ws_col = start->cols };
    if (master < 0)
        return -1;
    if (syscall(SYS_ioctl, master, TIOCSPTLCK, &unlocked) < 0 || syscall(SYS_ioctl, master, TIOCGPTN, &number) < 0) {
        close(master);
        return -1;
    }
    ioctl(master, TIOCSWINSZ, &size);
    snprintf(path, sizeof path, "/dev/pts/%u", number);
    *theirs = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*theirs < 0) {
        close(master);
        return -1;
    }
    return master;
}

enum { REPLIES = 3, REPORT, ENDS };

/* The descriptors of an execution, those that it does not have being -1. */
struct ends {
    int ours[ENDS];   /* the guest's: streams as on the wire (0 for input), then reports */
    int theirs[ENDS]; /* the program's, and the supervisor's way to report */
};

static bool open_pipe(struct ends *e, int stream)
{
    int pair[2];
    if (pipe2(pair, O_CLOEXEC) < 0)
        return false;
    e->ours[stream] = pair[stream == 0];
    e->theirs[stream] = pair[stream != 0];
    return true;
}

static bool open_terminals(const struct sk_start *start, struct ends *e)
{
    e->ours[1] = open_terminal(start, &e->theirs[0]);
    if (e->ours[1] < 0)
        return false;
    e->ours[0] = fcntl(e->ours[1], F_DUPFD_CLOEXEC, 0);
    e->theirs[1] = fcntl(e->theirs[0], F_DUPFD_CLOEXEC, 0);
    e->theirs[2] = fcntl(e->theirs[0], F_DUPFD_CLOEXEC, 0);
    return e->ours[0] >= 0 && e->theirs[1] >= 0 && e->theirs[2] >= 0;
}

static bool open_streams(const struct sk_start *start, struct ends *e)
{
    if (start->flags & SK_FLAG_PTY)
        return open_terminals(start, e);
    if (!open_pipe(e, 1) || !open_pipe(e, 2))
        return false;
    if (start->flags & SK_FLAG_STDIN)
        return open_pipe(e, 0);
    return (e->theirs[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;
}

static bool open_replies(struct ends *e)
{
    return open_pipe(e, REPLIES) && (e->theirs[REPLIES] = sk_high(e->theirs[REPLIES])) >= 0;
}

static void launch(uint32_t id, const struct sk_start *start)
{
    struct ends e;
    memset(&e, -1, sizeof e);
    bool good = open_streams(start, &e) && (!(start->flags & SK_FLAG_REPLIES) || open_replies(&e)) && open_pipe(&e, REPORT);
    int error = good ? ENOMEM : errno;
    struct sk_process *p = good ? sk_process_new(id, start) : NULL;
    if (p == NULL) {
        close_all(e.ours, ENDS);
        close_all(e.theirs, ENDS);
        sk_send_error(id, error, "pipes and processes");
        return;
    }
    const int extra[2] = { -1, e.theirs[REPLIES] };
    p->supervisor = sk_supervise(start, e.theirs, start->flags & SK_FLAG_PTY, e.theirs[REPORT], extra);
    error = errno;
    close_all(e.theirs, ENDS);
    for (int i = 0; i <= REPLIES; i++)
        sk_process_stream(p, i, e.ours[i]);
    p->report.fd = e.ours[REPORT];
    fcntl(p->report.fd, F_SETFL, O_NONBLOCK);
    if (p->supervisor < 0) {
        p->supervisor = 0;
        sk_process_abort(p, error, "fork");
        return;
    }
    sk_watch(&p->report, EPOLLIN);
}

static char *text_of(const struct sk_field *f) /* the byte behind it is the next field's tag, which has been read */
{
    char *text = (char *)(uintptr_t)f->data;
    text[f->len] = 0;
    return text;
}

/* Decodes into arrays that the caller frees; false for anything malformed. `copy` has a spare byte at its end. */
static bool decode(uint8_t *copy, size_t len, struct sk_start *s, char **strings, size_t room)
{
    struct sk_reader reader = { copy, len };
    struct sk_field f, previous = { 0, NULL, 0 };
    size_t args = 0, envs = 0;
    bool more;
    s->argv = strings;
    s->envp = strings + room;
    do {
        more = sk_next_field(&reader, &f);
        if (previous.data != NULL && previous.tag != SK_TAG_COMMAND)
            text_of(&previous);
        if (!more)
            break;
        previous = f;
        if (f.tag == SK_TAG_ARG && args + 1 < room)
            s->argv[args++] = (char *)(uintptr_t)f.data;
        else if (f.tag == SK_TAG_ENV && envs + 1 < room)
            s->envp[envs++] = (char *)(uintptr_t)f.data;
        else if (f.tag == SK_TAG_CWD)
            s->cwd = (char *)(uintptr_t)f.data;
        else if (f.tag == SK_TAG_SHELL)
            s->shell = (char *)(uintptr_t)f.data;
        else if (f.tag == SK_TAG_APPLET)
            s->applet = (char *)(uintptr_t)f.data;
        else if (f.tag == SK_TAG_COMMAND) {
            s->command = f.data;
            s->command_len = f.len;
        } else if (f.tag == SK_TAG_PROFILE) {
            s->profile = f.data;
            s->profile_len = f.len;
        } else if (f.tag == SK_TAG_USER && f.len == 8) {
            s->uid = sk_get32(f.data);
            s->gid = sk_get32(f.data + 4);
        } else if (f.tag == SK_TAG_FLAGS && f.len == 4)
            s->flags = sk_get32(f.data);
        else if (f.tag == SK_TAG_WINSIZE && f.len == 4) {
            s->rows = sk_get16(f.data);
            s->cols = sk_get16(f.data + 2);
        } else if (f.tag == SK_TAG_LIMIT && f.len == 8)
            s->limit = sk_get64(f.data);
        else if (f.tag == SK_TAG_CREDIT && f.len == 4)
            s->credit = sk_get32(f.data);
        else
            return false;
    } while (more);
    s->argv[args] = NULL;
    s->envp[envs] = NULL;
    if (s->profile != NULL && (s->shell != NULL || s->applet != NULL))
        return false;
    return reader.left == 0 && (s->shell ? s->command != NULL : args > 0);
}

void sk_process_start(uint32_t id, const uint8_t *payload, size_t len)
{
    struct sk_start start = { .uid = sk_config.uid, .gid = sk_config.gid, .limit = UINT64_MAX };
    size_t room = len / 5 + 2;
    uint8_t *copy = malloc(len + 1);
    char **strings = malloc(2 * room * sizeof *strings);
    if (sk_process_find(id) != NULL)
        sk_send_error(id, EEXIST, "this id is in use");
    else if (copy == NULL || strings == NULL)
        sk_send_error(id, ENOMEM, "request");
    else if (memcpy(copy, payload, len), !decode(copy, len, &start, strings, room))
        sk_send_error(id, EBADMSG, "malformed request");
    else if (start.shell != NULL)
        sk_shell_start(id, &start);
    else
        launch(id, &start);
    free(strings);
    free(copy);
}

/* Executions: starting them, moving their bytes, ending them.
 *
 * The guest forks a supervisor for each execution. The supervisor is a child subreaper and belongs to another
 * user than the workload where there is one; it starts the program by vfork, reports how that went and how the
 * program ended, and lives until nothing below it does. So "the tree is gone" is the event of its exit.
 *
 * Output goes to the host as far as the host gave credit; without credit the pipe fills and the program waits. All
 * that a stream holds goes into one frame. Small frames are paced: a program that writes single bytes all the time has
 * its pipes read every millisecond, one that writes now and then at once.
 * An execution whose output nobody takes (the host is gone, the program has ended but left others behind that
 * still write) is drained, so that nobody dies of a closed pipe. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "applets.h"
#include "kernel.h"
#include "skerry.h"

#define PROCESSES_MAX 2048
#define RING 65536
#define STREAMS 3 /* stdout, stderr, replies */
#define REPLIES 2
#define STDIN_WINDOW 65536
#define TAKE_READS 64    /* reads into one frame: a packet pipe gives one packet for each */
#define SMALL_FRAME 1024 /* frames below this are paced, so that single bytes come together */
#define SMALL_BURST 32
#define SMALL_PER_MS 1
#define CHASE_MS 2000    /* before a tree that keeps forking is ended by kill(-1) */
#define REPORT_MS 4000   /* for a shell or a supervisor, not waiting for a CPU, to report the end of what was killed */
#define STARVED_MS 25000 /* ... waiting or not; the host's limit is 40 s */
#define PTY_PATIENCE_MS 200

struct stream {
    struct sk_source source;
    struct sk_process *owner;
    uint8_t number; /* 1, 2 or 3, as on the wire */
    uint64_t total; /* bytes that the program wrote and we took */
    uint64_t sent;
    uint64_t target; /* what must have been taken before the end is told */
    uint32_t credit;
    uint8_t *ring;
};

struct sk_process {
    struct sk_process *next;
    uint32_t id;
    pid_t supervisor, pid;
    uint32_t flags;
    uint64_t limit;
    bool attached;  /* the host wants its output */
    bool exited;    /* the main program has ended */
    bool told;      /* ... and the host knows */
    bool killing;
    uint64_t since; /* of the kill, or of the end */
    uint64_t idle_since;   /* of a kill: who is to report its end has not been seen to wait for a CPU since then */
    struct sk_chase chase; /* of a kill */
    bool outruns;          /* ... so far */
    int code, signo;
    struct rusage usage;
    struct stream out[STREAMS];
    struct sk_source in, report;
    uint8_t *pending; /* input that the program has not taken yet */
    size_t pending_len;
    bool input_ended, input_held;
    char name[32];
};

static struct sk_process *processes;
static size_t process_count;
static uint8_t chunk[1 + SK_CHUNK];
static struct sk_tree tree;

static void advance(struct sk_process *p);

static struct sk_process *find(uint32_t id)
{
    struct sk_process *p = processes;
    while (p != NULL && p->id != id)
        p = p->next;
    return p;
}

bool sk_process_killing(const struct sk_process *p)
{
    return p->killing;
}

static bool ticking_needed(void)
{
    for (struct sk_process *p = processes; p != NULL; p = p->next)
        if (p->killing || (p->exited && !p->told))
            return true;
    return false;
}

static void release(struct sk_process *p)
{
    sk_shell_detach(p);
    for (struct sk_process **link = &processes; *link != NULL; link = &(*link)->next)
        if (*link == p) {
            *link = p->next;
            break;
        }
    for (int i = 0; i < STREAMS; i++) {
        sk_unwatch(&p->out[i].source);
        free(p->out[i].ring);
    }
    sk_unwatch(&p->in);
    sk_unwatch(&p->report);
    free(p->pending);
    free(p);
    process_count--;
}

/* ---- output ---- */

static void remember(struct stream *s, const uint8_t *data, size_t len)
{
    if (!(s->owner->flags & SK_FLAG_KEEP))
        return;
    if (s->ring == NULL && (s->ring = malloc(RING)) == NULL)
        return;
    for (size_t i = len > RING ? len - RING : 0; i < len; i++)
        s->ring[(s->total + i) % RING] = data[i];
}

/* How many small frames may be sent now. */
static unsigned small_left = SMALL_BURST;

static void refill_small(void)
{
    static uint64_t since;
    uint64_t now = sk_now_ms(), more = (now - since) * SMALL_PER_MS;
    small_left = more > SMALL_BURST - small_left ? SMALL_BURST : small_left + (unsigned)more;
    since = now;
}

static void send_output(struct stream *s, uint8_t *data, size_t len) /* data[-1] is ours to write */
{
    data[-1] = s->number;
    if (len < SMALL_FRAME && small_left > 0)
        small_left--;
    sk_send(SK_OUTPUT, s->owner->id, data - 1, len + 1);
}

/* Takes up to one chunk from the program; false when there is nothing to take or nobody may take it now. */
static bool take(struct stream *s)
{
    struct sk_process *p = s->owner;
    bool wanted = p->attached && sk_connected() && !p->told && s->total < p->limit;
    size_t most = SK_CHUNK;
    if (s->source.fd < 0)
        return false;
    if (wanted) {
        if (sk_congested() || (s->credit == 0 && !p->killing)) {
            sk_watch(&s->source, 0);
            return false;
        }
        if (s->credit < most)
            most = s->credit;
        if (p->limit - s->total < most)
            most = (size_t)(p->limit - s->total);
        if (most == 0) { /* being killed without credit: what is left is dropped */
            wanted = false;
            most = SK_CHUNK;
        }
    }
    ssize_t n = read(s->source.fd, chunk + 1, most);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        sk_watch(&s->source, EPOLLIN);
        return false;
    }
    if (n <= 0) { /* end of file; EIO from a terminal whose last user is gone */
        sk_unwatch(&s->source);
        return false;
    }
    size_t len = (size_t)n;
    for (int reads = 1; reads < TAKE_READS && len < most; reads++) {
        n = read(s->source.fd, chunk + 1 + len, most - len);
        if (n <= 0) /* an end, or an error, is there again at the next event */
            break;
        len += (size_t)n;
    }
    remember(s, chunk + 1, len);
    s->total += len;
    if (wanted) {
        s->sent += len;
        s->credit -= (uint32_t)len;
        send_output(s, chunk + 1, len);
    }
    return true;
}

/* Whether all that was in a stream a moment ago has been taken. */
static bool drained(struct stream *s)
{
    int available = 0;
    if (s->source.fd < 0 || ioctl(s->source.fd, FIONREAD, &available) < 0)
        return true;
    uint64_t target = s->total + (uint64_t)available;
    while (s->total < target && take(s))
        ;
    /* Still armed: there is nothing in it, whoever took the rest. */
    return s->total >= target || s->source.fd < 0 || s->source.armed != 0;
}

static void output_ready(struct sk_source *source, uint32_t events)
{
    struct stream *s = (struct stream *)source;
    struct sk_process *p = s->owner;
    (void)events;
    refill_small();
    if (small_left == 0) {
        sk_watch(source, 0);
        sk_pace();
    } else if (s == &p->out[REPLIES] && (!drained(&p->out[0]) || !drained(&p->out[1]))) {
        sk_watch(source, 0); /* a reply comes behind all output that was written before it */
    } else {
        take(s);
    }
    advance(p);
}

static void rearm(struct sk_process *p)
{
    for (int i = 0; i < STREAMS; i++)
        if (p->out[i].source.fd >= 0)
            sk_watch(&p->out[i].source, EPOLLIN);
}

/* ---- input ---- */

static void grant_input(struct sk_process *p, size_t bytes)
{
    uint8_t payload[4];
    sk_put32(payload, (uint32_t)bytes);
    sk_send(SK_STDIN_CREDIT, p->id, payload, sizeof payload);
}

static void input_ready(struct sk_source *source, uint32_t events)
{
    struct sk_process *p = (struct sk_process *)((char *)source - offsetof(struct sk_process, in));
    size_t done = 0;
    (void)events;
    while (done < p->pending_len) {
        ssize_t n = write(source->fd, p->pending + done, p->pending_len - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0) { /* nobody reads it any more: swallow the rest */
            grant_input(p, p->pending_len);
            p->pending_len = 0;
            sk_unwatch(source);
            return;
        }
        done += (size_t)n;
    }
    if (done > 0) {
        memmove(p->pending, p->pending + done, p->pending_len - done);
        p->pending_len -= done;
        grant_input(p, done);
    }
    if (p->pending_len == 0) {
        free(p->pending);
        p->pending = NULL;
        if (p->input_ended && !p->input_held)
            sk_unwatch(source);
        else
            sk_watch(source, 0);
    } else {
        sk_watch(source, EPOLLOUT);
    }
}

void sk_process_hold_input(struct sk_process *p, bool hold)
{
    p->input_held = hold;
    if (!hold && p->in.fd >= 0)
        input_ready(&p->in, 0);
}

void sk_process_stdin(uint32_t id, const uint8_t *data, size_t len)
{
    static const uint8_t end_of_transmission[1] = { 4 };
    struct sk_process *p = find(id);
    if (p == NULL)
        return;
    if (p->in.fd < 0 || p->input_ended) {
        grant_input(p, len);
        return;
    }
    if (len == 0) {
        p->input_ended = true;
        if (p->flags & SK_FLAG_PTY) { /* a terminal ends its input by a character */
            data = end_of_transmission;
            len = 1;
        }
    }
    if (p->pending_len + len > STDIN_WINDOW + 1) {
        sk_send_error(id, EOVERFLOW, "more input than was granted");
        return;
    }
    if (len > 0) {
        if (p->pending == NULL && (p->pending = malloc(STDIN_WINDOW + 1)) == NULL) {
            sk_send_error(id, ENOMEM, "input");
            return;
        }
        memcpy(p->pending + p->pending_len, data, len);
        p->pending_len += len;
    }
    input_ready(&p->in, 0);
}

/* ---- the end of an execution ---- */

static void tell(struct sk_process *p)
{
    uint8_t payload[48], *at = payload;
    at = sk_put32(at, (uint32_t)p->code);
    at = sk_put32(at, (uint32_t)p->signo);
    at = sk_put64(at, p->out[0].total);
    at = sk_put64(at, p->out[1].total);
    at = sk_put64(at, (uint64_t)p->usage.ru_utime.tv_sec * 1000000 + (uint64_t)p->usage.ru_utime.tv_usec);
    at = sk_put64(at, (uint64_t)p->usage.ru_stime.tv_sec * 1000000 + (uint64_t)p->usage.ru_stime.tv_usec);
    at = sk_put64(at, (uint64_t)p->usage.ru_maxrss);
    sk_send(SK_EXIT, p->id, payload, (size_t)(at - payload));
}

/* Moves an ended execution on: output first, then its end, then nothing is left of it. May free p. */
static void advance(struct sk_process *p)
{
    if (p->exited && !p->told) {
        bool pty = p->flags & SK_FLAG_PTY, waiting = false;
        for (int i = 0; i < STREAMS; i++) {
            struct stream *s = &p->out[i];
            while (s->source.fd >= 0 && s->total < s->target && take(s))
                ;
            bool late = pty && sk_now_ms() - p->since > PTY_PATIENCE_MS;
            /* Not armed: there is no credit for what it may still hold. */
            waiting |= s->source.fd >= 0 && s->total < s->target && (!late || s->source.armed == 0);
        }
        if (waiting && p->attached && sk_connected() && !p->killing) {
            if (pty)
                sk_tick(true);
            return;
        }
        p->told = true;
        sk_unwatch(&p->in);
        if (p->attached)
            tell(p);
        rearm(p); /* whoever still writes is drained from now on */
    }
    if (p->told && p->supervisor == 0 && p->out[0].source.fd < 0 && p->out[1].source.fd < 0 &&
        p->out[REPLIES].source.fd < 0 && !p->killing && !(p->flags & SK_FLAG_KEEP))
        release(p);
}

void sk_process_exited(struct sk_process *p, int code, int signo, const struct rusage *usage)
{
    if (p->exited)
        return;
    p->exited = true;
    p->since = sk_now_ms();
    p->code = code;
    p->signo = signo;
    if (usage != NULL)
        p->usage = *usage;
    for (int i = 0; i < STREAMS; i++) {
        int available = 0;
        struct stream *s = &p->out[i];
        if (p->input_held) { /* a shell's command that did not begin: there may never be another end to close */
            while (take(s))
                ;
            sk_unwatch(&s->source);
        }
        if (p->flags & SK_FLAG_PTY) /* cannot tell; it holds less than this */
            s->target = s->total + SK_CHUNK;
        else if (s->source.fd >= 0 && ioctl(s->source.fd, FIONREAD, &available) == 0)
            s->target = s->total + (uint64_t)available;
    }
    advance(p);
}

void sk_process_notice(struct sk_process *p, const char *text)
{
    uint8_t line[512];
    size_t len = strlen(text);
    if (len > sizeof line - 1)
        len = sizeof line - 1;
    memcpy(line + 1, text, len);
    remember(&p->out[1], line + 1, len);
    uint64_t room = p->limit - p->out[1].total; /* nothing has been taken yet that could exceed it */
    p->out[1].total += len;
    if (len > room)
        len = (size_t)room;
    p->out[1].sent += len;
    if (p->attached && len > 0)
        send_output(&p->out[1], line + 1, len);
}

const char *sk_step_text(int step)
{
    static const char *const steps[] = { "", "program", "working directory", "user", "fork", "limits" };
    return steps[step >= 0 && step <= SK_STEP_LIMITS ? step : 0];
}

/* One report, if there is one. May free p. */
static bool read_report(struct sk_process *p)
{
    struct sk_report report;
    ssize_t n = p->report.fd < 0 ? 0 : read(p->report.fd, &report, sizeof report);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (n != sizeof report) { /* the supervisor is gone; the rest follows when it is reaped */
        sk_unwatch(&p->report);
        return false;
    }
    if (report.kind == SK_REPORT_STARTED) {
        sk_process_started(p, report.value);
    } else if (report.kind == SK_REPORT_EXITED) {
        int signo = WIFSIGNALED(report.value) ? WTERMSIG(report.value) : 0;
        sk_process_exited(p, signo ? 128 + signo : WEXITSTATUS(report.value), signo, &report.usage);
    } else if (report.value == SK_STEP_EXEC) { /* as shells do: the program's fault, not ours */
        char text[256];
        bool missing = report.error == ENOENT || report.error == ENOTDIR;
        sk_process_started(p, 0);
        snprintf(text, sizeof text, "%s: %s\n", p->name, missing ? "command not found" : strerror(report.error));
        sk_process_notice(p, text);
        sk_process_exited(p, missing ? 127 : 126, 0, NULL);
    } else {
        sk_process_abort(p, report.error, sk_step_text(report.value));
    }
    return true;
}

static void report_ready(struct sk_source *source, uint32_t events)
{
    (void)events;
    read_report((struct sk_process *)((char *)source - offsetof(struct sk_process, report)));
}

/* ---- supervisor and program ---- */

static const struct sk_start *launching; /* shared with the vfork child */
static volatile int failed_step, failed_error;

static void search_and_exec(const struct sk_start *s)
{
    const char *path = NULL;
    char full[PATH_MAX];
    int error = ENOENT;
    if (strchr(s->argv[0], '/') != NULL) {
        execve(s->argv[0], s->argv, s->envp);
        return;
    }
    for (char **e = s->envp; *e != NULL; e++)
        if (strncmp(*e, "PATH=", 5) == 0)
            path = *e + 5;
    for (; path != NULL && *s->argv[0] != 0; path = *path ? path + 1 : NULL) {
        size_t len = strcspn(path, ":");
        if (len > 0 && (size_t)snprintf(full, sizeof full, "%.*s/%s", (int)len, path, s->argv[0]) < sizeof full) {
            /* To look first is ten times as quick as an exec that finds nothing. */
            if (access(full, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR))
                execve(full, s->argv, s->envp);
            if (errno != ENOENT && errno != ENOTDIR)
                error = errno;
        }
        path += len;
    }
    errno = error;
}

int sk_cap_limit(int resource, rlim_t value)
{
    uint64_t now[2]; /* soft, hard; the libraries disagree about the types of their wrappers */
    if (value == RLIM_INFINITY)
        return 0;
    if (syscall(SYS_prlimit64, 0, resource, NULL, now) < 0)
        return -1;
    now[0] = now[1] = value < now[1] ? value : now[1];
    return (int)syscall(SYS_prlimit64, 0, resource, now, NULL);
}

/* When memory runs out, the kernel shall take the workload, not the guest. Its processes inherit this. */
static void set_oom_score(void)
{
    /* The file is the host's root's while we cannot be dumped. For a moment we can: nobody inside has this user's
     * capabilities, and so nobody can look. */
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0 && write(fd, "300", 3) < 0) { /* best effort: the guest is the smallest process anyway */
    }
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (fd >= 0)
        close(fd);
}

static int fail_step(int step)
{
    failed_error = errno;
    failed_step = step;
    return -1;
}

/* In the new process: everything between fork and exec. Returns only on failure. */
static int become_workload(const int stdio[3], bool pty, const int extra[2])
{
    const struct sk_start *s = launching;
    sigset_t none;
    setsid();
    for (int i = 0; i < 3; i++)
        if (dup2(stdio[i], i) < 0)
            return fail_step(SK_STEP_FORK);
    if (pty)
        ioctl(0, TIOCSCTTY, 0);
    for (int i = 0; i < 2; i++)
        if (extra[i] >= 0 && dup2(extra[i], 8 + i) < 0)
            return fail_step(SK_STEP_FORK);
    if (sk_config.switch_users &&
        (setgroups(0, NULL) < 0 || setresgid(s->gid, s->gid, s->gid) < 0 || setresuid(s->uid, s->uid, s->uid) < 0))
        return fail_step(SK_STEP_USER);
    if (!sk_config.switch_users && (s->uid != sk_config.uid || s->gid != sk_config.gid)) {
        errno = EPERM;
        return fail_step(SK_STEP_USER);
    }
    struct capability_header header = { .version = CAPABILITY_VERSION };
    struct capability_data nothing[2] = { { 0, 0, 0 }, { 0, 0, 0 } };
    if (getpid() != 1 && sk_config.switch_users && syscall(SYS_capset, &header, nothing) < 0)
        return fail_step(SK_STEP_USER);
    if (chdir(s->cwd ? s->cwd : sk_config.workspace) < 0)
        return fail_step(SK_STEP_CWD);
    if (sk_cap_limit(RLIMIT_NOFILE, sk_config.fds) < 0 ||
        sk_cap_limit(RLIMIT_DATA, sk_config.data) < 0 || sk_cap_limit(RLIMIT_FSIZE, sk_config.file_size) < 0 ||
        sk_cap_limit(RLIMIT_NPROC, sk_config.processes) < 0)
        return fail_step(SK_STEP_LIMITS);
    signal(SIGPIPE, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (s->applet != NULL) {
        int argc = 0;
        while (s->argv[argc] != NULL)
            argc++;
        /* There is no exec to close these: all that stays is stdio and the two roots. */
        close(sk_config.listen_fd);
        syscall(NR_CLOSE_RANGE, (unsigned)sk_roots.tmp_fd + 1, ~0u, 0);
        _exit(applet_run(s->applet, argc, s->argv, &sk_roots));
    }
    search_and_exec(s);
    return fail_step(SK_STEP_EXEC);
}

static void send_report(int fd, uint32_t kind, int value, int error, const struct rusage *usage)
{
    struct sk_report report = { .kind = kind, .value = value, .error = error };
    if (usage != NULL)
        report.usage = *usage;
    if (write(fd, &report, sizeof report) < 0) { /* the guest is gone: so are we, soon */
    }
}

static _Noreturn void supervise(const int stdio[3], bool pty, int report_fd, const int extra[2])
{
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_NAME, "skerry-watch", 0, 0, 0);
    /* A user whom the workload cannot signal. */
    if (sk_config.switch_users && (setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0)) {
        send_report(report_fd, SK_REPORT_FAILED, SK_STEP_USER, errno, NULL);
        _exit(1);
    }
    if (sk_config.switch_users)
        set_oom_score();
    /* An applet stays in this program, so it needs memory of its own. */
    pid_t pid = launching->applet != NULL ? fork() : vfork();
    if (pid == 0) {
        become_workload(stdio, pty, extra);
        if (launching->applet != NULL) /* in memory of its own: it has to speak for itself */
            dprintf(2, "errno=%d %s: start\n", failed_error, strerror(failed_error));
        _exit(3);
    }
    if (pid < 0)
        send_report(report_fd, SK_REPORT_FAILED, SK_STEP_FORK, errno, NULL);
    else if (failed_step)
        send_report(report_fd, SK_REPORT_FAILED, failed_step, failed_error, NULL);
    else
        send_report(report_fd, SK_REPORT_STARTED, pid, 0, NULL);
    bool silent = pid < 0 || failed_step;
    /* It keeps its way to report and nothing else. */
    if (report_fd != 0)
        dup2(report_fd, 0);
    syscall(NR_CLOSE_RANGE, 1u, ~0u, 0);
    struct capability_header header = { .version = CAPABILITY_VERSION };
    struct capability_data nothing[2] = { { 0, 0, 0 }, { 0, 0, 0 } };
    syscall(SYS_capset, &header, nothing);
    for (;;) {
        int status;
        struct rusage usage;
        pid_t ended = wait4(-1, &status, 0, &usage);
        if (ended < 0 && errno == EINTR)
            continue;
        if (ended < 0)
            _exit(0);
        if (ended == pid && !silent)
            send_report(0, SK_REPORT_EXITED, status, 0, &usage);
    }
}

pid_t sk_supervise(const struct sk_start *start, const int stdio[3], bool pty, int report_fd, const int extra[2])
{
    launching = start;
    failed_step = failed_error = 0;
    pid_t pid = fork();
    if (pid == 0)
        supervise(stdio, pty, report_fd, extra);
    return pid;
}

/* ---- starting ---- */

struct sk_process *sk_process_new(uint32_t id, const struct sk_start *start)
{
    struct sk_process *p = process_count < PROCESSES_MAX ? calloc(1, sizeof *p) : NULL;
    if (p == NULL)
        return NULL;
    p->id = id;
    p->flags = start->flags;
    p->limit = start->limit;
    p->attached = true;
    p->in.fd = p->report.fd = -1;
    p->in.ready = input_ready;
    p->report.ready = report_ready;
    for (int i = 0; i < STREAMS; i++)
        p->out[i] = (struct stream){ .source = { .fd = -1, .ready = output_ready },
                                     .owner = p, .number = (uint8_t)(i + 1), .credit = start->credit };
    snprintf(p->name, sizeof p->name, "%s", start->shell ? start->shell : start->applet ? start->applet : start->argv[0]);
    p->next = processes;
    processes = p;
    process_count++;
    return p;
}

void sk_process_abort(struct sk_process *p, int error, const char *text)
{
    sk_send_error(p->id, error, text);
    p->exited = p->told = true;
    p->flags &= ~(uint32_t)SK_FLAG_KEEP;
    for (int i = 0; i < STREAMS; i++)
        sk_unwatch(&p->out[i].source);
    sk_unwatch(&p->in);
    advance(p);
}

void sk_process_stream(struct sk_process *p, int stream, int fd)
{
    if (fd >= 0)
        fcntl(fd, F_SETFL, (fcntl(fd, F_GETFL) & O_ACCMODE) | O_NONBLOCK);
    if (stream == 0) {
        p->in.fd = fd;
    } else {
        p->out[stream - 1].source.fd = fd;
        if (fd >= 0)
            sk_watch(&p->out[stream - 1].source, EPOLLIN);
    }
}

void sk_process_started(struct sk_process *p, pid_t pid)
{
    uint8_t payload[20];
    p->pid = pid;
    sk_put64(sk_put64(sk_put32(payload, (uint32_t)pid), 0), 0);
    if (p->attached)
        sk_send(SK_STARTED, p->id, payload, sizeof payload);
}

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

static void launch(uint32_t id, struct sk_start *start)
{
    /* ours[i] is the guest's end of stream i, theirs[i] the program's */
    int ours[3] = { -1, -1, -1 }, theirs[3] = { -1, -1, -1 }, report[2] = { -1, -1 }, pair[2];
    int replies = -1, extra[2] = { -1, -1 };
    bool pty = start->flags & SK_FLAG_PTY, good = true;
    struct sk_process *p = NULL;
    if (pty) {
        ours[1] = open_terminal(start, &theirs[0]);
        good = ours[1] >= 0;
        ours[0] = good ? fcntl(ours[1], F_DUPFD_CLOEXEC, 0) : -1;
        theirs[1] = good ? fcntl(theirs[0], F_DUPFD_CLOEXEC, 0) : -1;
        theirs[2] = good ? fcntl(theirs[0], F_DUPFD_CLOEXEC, 0) : -1;
        good = good && ours[0] >= 0 && theirs[1] >= 0 && theirs[2] >= 0;
    } else {
        for (int i = 1; i < 3 && good; i++) {
            good = pipe2(pair, O_CLOEXEC) == 0;
            if (good) {
                ours[i] = pair[0];
                theirs[i] = pair[1];
            }
        }
        if (good && start->flags & SK_FLAG_STDIN) {
            good = pipe2(pair, O_CLOEXEC) == 0;
            if (good) {
                theirs[0] = pair[0];
                ours[0] = pair[1];
            }
        } else if (good) {
            good = (theirs[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;
        }
    }
    if (good && start->flags & SK_FLAG_REPLIES) {
        good = pipe2(pair, O_CLOEXEC) == 0;
        if (good) {
            replies = pair[0];
            extra[1] = sk_high(pair[1]);
            good = extra[1] >= 0;
        }
    }
    good = good && pipe2(report, O_CLOEXEC) == 0;
    int error = good ? ENOMEM : errno;
    if (good)
        p = sk_process_new(id, start);
    if (p == NULL) {
        close_all(ours, 3);
        close_all(theirs, 3);
        close_all(report, 2);
        close_all(&replies, 1);
        close_all(extra, 2);
        sk_send_error(id, error, "pipes and processes");
        return;
    }
    p->supervisor = sk_supervise(start, theirs, pty, report[1], extra);
    error = errno;
    close_all(theirs, 3);
    close_all(extra, 2);
    close(report[1]);
    for (int i = 0; i < 3; i++)
        sk_process_stream(p, i, ours[i]);
    sk_process_stream(p, REPLIES + 1, replies);
    p->report.fd = report[0];
    fcntl(report[0], F_SETFL, O_NONBLOCK);
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
    return reader.left == 0 && (s->shell ? s->command != NULL : args > 0);
}

void sk_process_start(uint32_t id, const uint8_t *payload, size_t len)
{
    struct sk_start start = { .uid = sk_config.uid, .gid = sk_config.gid, .limit = UINT64_MAX };
    size_t room = len / 5 + 2;
    uint8_t *copy = malloc(len + 1);
    char **strings = malloc(2 * room * sizeof *strings);
    if (find(id) != NULL)
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

/* ---- control ---- */

void sk_process_credit(uint32_t id, int stream, uint32_t bytes)
{
    struct sk_process *p = find(id);
    if (p == NULL || stream < 1 || stream > STREAMS)
        return;
    struct stream *s = &p->out[stream - 1];
    s->credit = bytes > UINT32_MAX - s->credit ? UINT32_MAX : s->credit + bytes;
    rearm(p); /* replies may have waited for it as well */
    advance(p);
}

static void read_tree(struct sk_process *p)
{
    tree.count = 0;
    tree.dying = false;
    if (!sk_shell_tree(p, &tree) && p->supervisor != 0)
        sk_tree_read(&tree, p->supervisor, 0, NULL);
}

static void signal_tree(int signo)
{
    for (size_t i = 0; i < tree.count; i++)
        kill(tree.pids[i], signo);
}

/* Reads the tree until all that is in it is stopped: then nothing of it forks meanwhile. */
static void stop_tree(struct sk_process *p)
{
    read_tree(p);
    for (size_t before = 0; tree.count > before;) {
        before = tree.count;
        signal_tree(SIGSTOP);
        read_tree(p);
    }
}

void sk_process_signal(uint32_t id, int signo)
{
    struct sk_process *p = find(id);
    if (p == NULL || p->exited || signo < 1 || signo > 64)
        return;
    if (p->pid > 0) {
        kill(-p->pid, signo);
    } else { /* a shell's command has no process group of its own */
        /* A fork that has said that it is done is the shell from now on, and not to be signaled. */
        stop_tree(p);
        sk_shell_listen(p);
        bool ended = find(id) != p || p->exited;
        if (!ended)
            signal_tree(signo);
        if (ended || signo != SIGSTOP)
            signal_tree(SIGCONT);
    }
}

/* Stopped processes cannot fork, and keep their place under the process limit: once all that were found are
 * stopped and none is new, killing them one by one ends the tree. Returns true when nothing is left. */
static bool kill_tree(struct sk_process *p)
{
    stop_tree(p);
    p->outruns = sk_tree_outruns(&p->chase, &tree);
    if (tree.count == 0)
        return true;
    signal_tree(SIGKILL);
    return false;
}

static void finish_kill(struct sk_process *p)
{
    /* Still marked as being killed, so that its end does not free it yet. */
    if (!p->exited && !sk_shell_break(p))
        sk_process_exited(p, 128 + SIGKILL, SIGKILL, NULL);
    p->killing = false;
    sk_shell_detach(p);
    sk_send(SK_KILLED, p->id, NULL, 0);
}

void sk_process_kill(uint32_t id)
{
    struct sk_process *p = find(id);
    if (p == NULL) {
        sk_send(SK_KILLED, id, NULL, 0);
        return;
    }
    if (!p->killing) {
        p->killing = true;
        p->since = sk_now_ms();
        p->idle_since = p->since;
        p->chase = (struct sk_chase){ 0 };
    }
    kill_tree(p);
    sk_tick(true);
}

/* The last report is awaited, so that the end is told as it was and a shell keeps its state; and the dead, which keep
 * their places under the process limit until then. */
static bool kill_settled(struct sk_process *p)
{
    uint64_t now = sk_now_ms();
    pid_t shell = sk_shell_pid(p);
    if (p->supervisor == 0 && p->exited && !tree.dying)
        return true;
    if (sk_waits_for_machine(shell != 0 ? shell : p->supervisor))
        p->idle_since = now;
    return now - p->idle_since > REPORT_MS || now - p->since > STARVED_MS;
}

static void continue_kill(struct sk_process *p)
{
    bool gone = kill_tree(p);
    /* This cannot be outrun, and spares nobody else either: so not for a tree that is only slow to die, on a busy
     * machine. */
    if (!gone && p->outruns && getpid() == 1 && sk_now_ms() - p->since > CHASE_MS)
        kill(-1, SIGKILL);
    if (gone && kill_settled(p))
        finish_kill(p);
}

void sk_process_tick(void)
{
    for (struct sk_process *p = processes, *next; p != NULL; p = next) {
        next = p->next;
        if (p->killing)
            continue_kill(p);
        advance(p);
    }
    if (!ticking_needed())
        sk_tick(false);
}

void sk_process_resize(uint32_t id, uint16_t rows, uint16_t cols)
{
    struct sk_process *p = find(id);
    struct winsize size = { .ws_row = rows, .ws_col = cols };
    if (p != NULL && p->flags & SK_FLAG_PTY && p->out[0].source.fd >= 0)
        ioctl(p->out[0].source.fd, TIOCSWINSZ, &size);
}

void sk_process_list(uint32_t request)
{
    static uint8_t reply[SK_PAYLOAD_MAX];
    uint8_t *at = reply;
    sk_tree_hold(processes != NULL);
    for (struct sk_process *p = processes; p != NULL && at + 64 < reply + sizeof reply; p = p->next) {
        read_tree(p);
        size_t len = strlen(p->name);
        at = sk_put32(at, p->id);
        at = sk_put32(at, (uint32_t)p->pid);
        at = sk_put32(at, p->exited);
        at = sk_put32(at, (uint32_t)p->code);
        at = sk_put32(at, (uint32_t)tree.count);
        at = sk_put32(at, (uint32_t)len);
        memcpy(at, p->name, len);
        at += len;
    }
    sk_tree_hold(false);
    sk_send(SK_RESULT, request, reply, (size_t)(at - reply));
}

void sk_process_attach(uint32_t id, uint32_t credit)
{
    struct sk_process *p = find(id);
    uint8_t payload[20], *at;
    if (p == NULL) {
        sk_send_error(id, ESRCH, "no such execution");
        return;
    }
    p->attached = true;
    at = sk_put32(payload, (uint32_t)p->pid);
    for (int i = 0; i < 2; i++) {
        uint64_t total = p->out[i].total;
        at = sk_put64(at, !p->out[i].ring ? total : total > RING ? total - RING : 0);
    }
    sk_send(SK_STARTED, id, payload, sizeof payload);
    for (int i = 0; i < STREAMS; i++) {
        struct stream *s = &p->out[i];
        size_t have = !s->ring ? 0 : s->total > RING ? RING : (size_t)s->total;
        for (size_t k = 0; k < have; k++)
            chunk[1 + k] = s->ring[(s->total - have + k) % RING];
        if (have > 0)
            send_output(s, chunk + 1, have);
        s->credit = credit;
    }
    grant_input(p, p->pending_len < STDIN_WINDOW ? STDIN_WINDOW - p->pending_len : 0);
    if (p->told)
        tell(p);
    else
        rearm(p);
}

void sk_process_forget(uint32_t id)
{
    struct sk_process *p = find(id);
    if (p == NULL)
        return;
    p->flags &= ~(uint32_t)SK_FLAG_KEEP;
    p->attached = false;
    rearm(p);
    advance(p);
}

void sk_process_disconnected(void)
{
    for (struct sk_process *p = processes, *next; p != NULL; p = next) {
        next = p->next;
        p->attached = false;
        rearm(p);
        advance(p);
    }
}

void sk_process_rearm(void)
{
    for (struct sk_process *p = processes; p != NULL; p = p->next)
        rearm(p);
}

/* ---- reaping ---- */

/* Orphans come to us only when a supervisor was killed from inside: nothing vouches for them any more. */
static void kill_strays(void)
{
    sk_tree_read(&tree, getpid(), 0, NULL);
    for (size_t i = 0; i < tree.count; i++) {
        bool known = sk_parent_of(tree.pids[i]) != getpid();
        for (struct sk_process *p = processes; p != NULL && !known; p = p->next)
            known = p->supervisor == tree.pids[i];
        if (!known && !sk_shell_owns(tree.pids[i]))
            kill(tree.pids[i], SIGKILL);
    }
}

void sk_process_reap(void)
{
    pid_t pid;
    int status;
    bool strays = false;
    while ((pid = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0) {
        if (WIFSTOPPED(status)) { /* stopped from inside, it would hold up its execution: the same as killing it */
            kill(pid, SIGKILL);
            continue;
        }
        struct sk_process *p = processes;
        while (p != NULL && p->supervisor != pid)
            p = p->next;
        if (p == NULL) {
            strays |= !sk_shell_reaped(pid) || status != 0;
            continue;
        }
        strays |= status != 0;
        uint32_t id = p->id;
        while (find(id) == p && read_report(p)) /* its last words may still be in the pipe */
            ;
        if (find(id) != p)
            continue;
        p->supervisor = 0;
        if (!p->exited)
            sk_process_exited(p, 128 + SIGKILL, SIGKILL, NULL);
        else
            advance(p);
    }
    if (strays)
        kill_strays();
}

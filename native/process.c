/* Executions: what is known of each, how they end, and how the host finds them again.
 *
 * start.c makes one, supervisor.c runs its program, streams.c moves its bytes, kill.c signals and ends its tree. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "process.h"

#define PROCESSES_MAX 2048
#define PTY_PATIENCE_MS 200

struct sk_process *sk_processes;
static size_t process_count;

struct sk_process *sk_process_find(uint32_t id)
{
    struct sk_process *p = sk_processes;
    while (p != NULL && p->id != id)
        p = p->next;
    return p;
}

bool sk_process_killing(const struct sk_process *p)
{
    return p->killing;
}

static void release(struct sk_process *p)
{
    sk_shell_detach(p);
    for (struct sk_process **link = &sk_processes; *link != NULL; link = &(*link)->next)
        if (*link == p) {
            *link = p->next;
            break;
        }
    for (int i = 0; i < SK_STREAMS; i++) {
        sk_unwatch(&p->out[i].source);
        free(p->out[i].ring);
    }
    sk_unwatch(&p->in);
    sk_unwatch(&p->report);
    free(p->pending);
    free(p);
    process_count--;
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
void sk_process_advance(struct sk_process *p)
{
    if (p->exited && !p->told) {
        bool pty = p->flags & SK_FLAG_PTY, waiting = false;
        for (int i = 0; i < SK_STREAMS; i++) {
            struct sk_stream *s = &p->out[i];
            while (s->source.fd >= 0 && s->total < s->target && sk_stream_take(s))
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
        sk_stream_rearm(p); /* whoever still writes is drained from now on */
    }
    if (p->told && p->supervisor == 0 && p->out[0].source.fd < 0 && p->out[1].source.fd < 0 &&
        p->out[SK_REPLIES].source.fd < 0 && !p->killing && !(p->flags & SK_FLAG_KEEP))
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
    for (int i = 0; i < SK_STREAMS; i++) {
        int available = 0;
        struct sk_stream *s = &p->out[i];
        if (p->input_held) { /* a shell's command that did not begin: there may never be another end to close */
            while (sk_stream_take(s))
                ;
            sk_unwatch(&s->source);
        }
        if (p->flags & SK_FLAG_PTY) /* cannot tell; it holds less than this */
            s->target = s->total + SK_CHUNK;
        else if (s->source.fd >= 0 && ioctl(s->source.fd, FIONREAD, &available) == 0)
            s->target = s->total + (uint64_t)available;
    }
    sk_process_advance(p);
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

/* ---- the beginning ---- */

struct sk_process *sk_process_new(uint32_t id, const struct sk_start *start)
{
    struct sk_process *p = process_count < PROCESSES_MAX ? calloc(1, sizeof *p) : NULL;
    if (p == NULL)
        return NULL;
    p->id = id;
    p->flags = start->flags;
    p->limit = start->limit;
    p->attached = true;
    p->begins = start->profile != NULL;
    p->in.fd = p->report.fd = -1;
    p->in.ready = sk_input_ready;
    p->report.ready = report_ready;
    for (int i = 0; i < SK_STREAMS; i++)
        p->out[i] = (struct sk_stream){ .source = { .fd = -1, .ready = sk_output_ready },
                                        .owner = p, .number = (uint8_t)(i + 1), .credit = start->credit };
    snprintf(p->name, sizeof p->name, "%s", start->shell ? start->shell : start->applet ? start->applet : start->argv[0]);
    p->next = sk_processes;
    sk_processes = p;
    process_count++;
    return p;
}

void sk_process_abort(struct sk_process *p, int error, const char *text)
{
    sk_send_error(p->id, error, text);
    p->exited = p->told = true;
    p->flags &= ~(uint32_t)SK_FLAG_KEEP;
    for (int i = 0; i < SK_STREAMS; i++)
        sk_unwatch(&p->out[i].source);
    sk_unwatch(&p->in);
    sk_process_advance(p);
}

void sk_process_started(struct sk_process *p, pid_t pid)
{
    uint8_t payload[20];
    p->begins = false;
    p->pid = pid;
    sk_put64(sk_put64(sk_put32(payload, (uint32_t)pid), 0), 0);
    if (p->attached)
        sk_send(SK_STARTED, p->id, payload, sizeof payload);
}

bool sk_process_begins(pid_t pid)
{
    pid_t parent = sk_parent_of(pid);
    for (struct sk_process *p = sk_processes; p != NULL; p = p->next)
        if (p->begins && p->supervisor == parent && parent > 0)
            return true;
    return false;
}

/* ---- the host's view ---- */

void sk_process_list(uint32_t request)
{
    static uint8_t reply[SK_PAYLOAD_MAX];
    uint8_t *at = reply;
    sk_tree_hold(sk_processes != NULL);
    for (struct sk_process *p = sk_processes; p != NULL && at + 64 < reply + sizeof reply; p = p->next) {
        size_t len = strlen(p->name);
        at = sk_put32(at, p->id);
        at = sk_put32(at, (uint32_t)p->pid);
        at = sk_put32(at, p->exited);
        at = sk_put32(at, (uint32_t)p->code);
        at = sk_put32(at, (uint32_t)sk_kill_count(p));
        at = sk_put32(at, (uint32_t)len);
        memcpy(at, p->name, len);
        at += len;
    }
    sk_tree_hold(false);
    sk_send(SK_RESULT, request, reply, (size_t)(at - reply));
}

void sk_process_attach(uint32_t id, uint32_t credit)
{
    struct sk_process *p = sk_process_find(id);
    uint8_t payload[20], *at;
    if (p == NULL) {
        sk_send_error(id, ESRCH, "no such execution");
        return;
    }
    p->attached = true;
    at = sk_put32(payload, (uint32_t)p->pid);
    for (int i = 0; i < 2; i++)
        at = sk_put64(at, sk_stream_kept_from(&p->out[i]));
    sk_send(SK_STARTED, id, payload, sizeof payload);
    for (int i = 0; i < SK_STREAMS; i++) {
        sk_stream_replay(&p->out[i]);
        p->out[i].credit = credit;
    }
    sk_input_grant(p, p->pending_len < SK_STDIN_WINDOW ? SK_STDIN_WINDOW - p->pending_len : 0);
    if (p->told)
        tell(p);
    else
        sk_stream_rearm(p);
}

void sk_process_forget(uint32_t id)
{
    struct sk_process *p = sk_process_find(id);
    if (p == NULL)
        return;
    p->flags &= ~(uint32_t)SK_FLAG_KEEP;
    p->attached = false;
    sk_stream_rearm(p);
    sk_process_advance(p);
}

void sk_process_disconnected(void)
{
    for (struct sk_process *p = sk_processes, *next; p != NULL; p = next) {
        next = p->next;
        p->attached = false;
        sk_stream_rearm(p);
        sk_process_advance(p);
    }
}

/* ---- reaping ---- */

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
        struct sk_process *p = sk_processes;
        while (p != NULL && p->supervisor != pid)
            p = p->next;
        if (p == NULL) {
            strays |= !sk_shell_reaped(pid) || status != 0;
            continue;
        }
        strays |= status != 0;
        uint32_t id = p->id;
        while (sk_process_find(id) == p && read_report(p)) /* its last words may still be in the pipe */
            ;
        if (sk_process_find(id) != p)
            continue;
        p->supervisor = 0;
        if (!p->exited)
            sk_process_exited(p, 128 + SIGKILL, SIGKILL, NULL);
        else
            sk_process_advance(p);
    }
    if (strays)
        sk_kill_strays();
}

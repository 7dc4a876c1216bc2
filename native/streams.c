/* The streams of executions: output under flow control, input as far as the program takes it.
 *
 * Output goes to the host as far as the host gave credit; without credit the pipe fills and the program waits. All
 * that a stream holds goes into one frame. Small frames are paced: a program that writes single bytes all the time has
 * its pipes read every millisecond, one that writes now and then at once.
 * An execution whose output nobody takes (the host is gone, the program has ended but left others behind that
 * still write) is drained, so that nobody dies of a closed pipe. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "process.h"

#define RING 65536 /* output that is kept for who attaches */
#define TAKE_READS 64    /* reads into one frame: a packet pipe gives one packet for each */
#define SMALL_FRAME 1024 /* frames below this are paced, so that single bytes come together */
#define SMALL_BURST 32
#define SMALL_PER_MS 1

static uint8_t chunk[1 + SK_CHUNK];

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

/* ---- output ---- */

static void remember(struct sk_stream *s, const uint8_t *data, size_t len)
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

static void send_output(struct sk_stream *s, uint8_t *data, size_t len) /* data[-1] is ours to write */
{
    data[-1] = s->number;
    if (len < SMALL_FRAME && small_left > 0)
        small_left--;
    sk_send(SK_OUTPUT, s->owner->id, data - 1, len + 1);
}

bool sk_stream_take(struct sk_stream *s)
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
static bool drained(struct sk_stream *s)
{
    int available = 0;
    if (s->source.fd < 0 || ioctl(s->source.fd, FIONREAD, &available) < 0)
        return true;
    uint64_t target = s->total + (uint64_t)available;
    while (s->total < target && sk_stream_take(s))
        ;
    /* Still armed: there is nothing in it, whoever took the rest. */
    return s->total >= target || s->source.fd < 0 || s->source.armed != 0;
}

void sk_output_ready(struct sk_source *source, uint32_t events)
{
    struct sk_stream *s = (struct sk_stream *)source;
    struct sk_process *p = s->owner;
    (void)events;
    refill_small();
    if (small_left == 0) {
        sk_watch(source, 0);
        sk_pace();
    } else if (s == &p->out[SK_REPLIES] && (!drained(&p->out[0]) || !drained(&p->out[1]))) {
        sk_watch(source, 0); /* a reply comes behind all output that was written before it */
    } else {
        sk_stream_take(s);
    }
    sk_process_advance(p);
}

void sk_stream_rearm(struct sk_process *p)
{
    for (int i = 0; i < SK_STREAMS; i++)
        if (p->out[i].source.fd >= 0)
            sk_watch(&p->out[i].source, EPOLLIN);
}

uint64_t sk_stream_kept_from(const struct sk_stream *s)
{
    return s->ring == NULL ? s->total : s->total > RING ? s->total - RING : 0;
}

void sk_stream_replay(struct sk_stream *s)
{
    size_t have = (size_t)(s->total - sk_stream_kept_from(s));
    for (size_t k = 0; k < have; k++)
        chunk[1 + k] = s->ring[(s->total - have + k) % RING];
    if (have > 0)
        send_output(s, chunk + 1, have);
}

void sk_process_rearm(void)
{
    for (struct sk_process *p = sk_processes; p != NULL; p = p->next)
        sk_stream_rearm(p);
}

void sk_process_credit(uint32_t id, int stream, uint32_t bytes)
{
    struct sk_process *p = sk_process_find(id);
    if (p == NULL || stream < 1 || stream > SK_STREAMS)
        return;
    struct sk_stream *s = &p->out[stream - 1];
    s->credit = bytes > UINT32_MAX - s->credit ? UINT32_MAX : s->credit + bytes;
    sk_stream_rearm(p); /* replies may have waited for it as well */
    sk_process_advance(p);
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

/* ---- input ---- */

void sk_input_grant(struct sk_process *p, size_t bytes)
{
    uint8_t payload[4];
    sk_put32(payload, (uint32_t)bytes);
    sk_send(SK_STDIN_CREDIT, p->id, payload, sizeof payload);
}

void sk_input_ready(struct sk_source *source, uint32_t events)
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
            sk_input_grant(p, p->pending_len);
            p->pending_len = 0;
            sk_unwatch(source);
            return;
        }
        done += (size_t)n;
    }
    if (done > 0) {
        memmove(p->pending, p->pending + done, p->pending_len - done);
        p->pending_len -= done;
        sk_input_grant(p, done);
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
        sk_input_ready(&p->in, 0);
}

void sk_process_stdin(uint32_t id, const uint8_t *data, size_t len)
{
    static const uint8_t end_of_transmission[1] = { 4 };
    struct sk_process *p = sk_process_find(id);
    if (p == NULL)
        return;
    if (p->in.fd < 0 || p->input_ended) {
        sk_input_grant(p, len);
        return;
    }
    if (len == 0) {
        p->input_ended = true;
        if (p->flags & SK_FLAG_PTY) { /* a terminal ends its input by a character */
            data = end_of_transmission;
            len = 1;
        }
    }
    if (p->pending_len + len > SK_STDIN_WINDOW + 1) {
        sk_send_error(id, EOVERFLOW, "more input than was granted");
        return;
    }
    if (len > 0) {
        if (p->pending == NULL && (p->pending = malloc(SK_STDIN_WINDOW + 1)) == NULL) {
            sk_send_error(id, ENOMEM, "input");
            return;
        }
        memcpy(p->pending + p->pending_len, data, len);
        p->pending_len += len;
    }
    sk_input_ready(&p->in, 0);
}
void sk_process_resize(uint32_t id, uint16_t rows, uint16_t cols)
{
    struct sk_process *p = sk_process_find(id);
    struct winsize size = { .ws_row = rows, .ws_col = cols };
    if (p != NULL && p->flags & SK_FLAG_PTY && p->out[0].source.fd >= 0)
        ioctl(p->out[0].source.fd, TIOCSWINSZ, &size);
    if (p != NULL && p->flags & SK_FLAG_PTY && sk_config.gvisor && p->pid > 0) { /* it signals nobody */
        pid_t foreground = tcgetpgrp(p->out[0].source.fd);
        kill(-(foreground > 0 ? foreground : p->pid), SIGWINCH);
    }
}

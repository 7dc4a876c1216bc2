/* Steps that run a virtual machine: see launch.c. This process stays the first of the environment, and the machine's
 * monitor is its child. It passes the guest's connections on to the machine: see wire.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"
#include "wire.h"

/* What they are here, and for the monitor: host.vm knows these numbers. Without a disk or a tap it is
 * /dev/null. */
enum { OUT = 5, ERR = 6, STEPS = 7, COUNTER = 8, DISK = 9, TAP = 10, SERVED = 3 };
enum { MONITOR_WIRE = 3, MONITOR_DISK = 4, MONITOR_TAP = 5 };

static int answers = OUT, listener = -1, ended = -1;
static bool up;
static uint32_t serial;

/* In a child. 0 is /dev/null, 1 and 2 are the log; what is above `last` is closed. */
static _Noreturn void execute(char **argv, int log, int last)
{
    static char *nothing[] = { NULL };
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (dup2(log, 1) >= 0 && dup2(log, 2) >= 0 && dup2(null, 0) >= 0 &&
        syscall(NR_CLOSE_RANGE, (unsigned)last + 1, LAST_FD, 0) >= 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) >= 0)
        execve(argv[0], argv, nothing);
    _exit(127);
}

void sk_serve_step(const struct sk_cursor *c)
{
    errno = EINVAL;
    if (c->argc < 4)
        sk_fail("serve", "number of arguments");
    int fd = sk_listen("serve", c->argv[2]);
    pid_t pid = (pid_t)sk_check(fork(), "serve", "fork");
    if (pid == 0) {
        int log = fcntl(sk_slots[sk_slot("serve", c->argv[1])], F_DUPFD_CLOEXEC, 200);
        if (log >= 0 && (fd == SERVED ? fcntl(fd, F_SETFD, 0) : dup2(fd, SERVED)) >= 0)
            execute((char **)(uintptr_t)c->argv + 3, log, SERVED);
        _exit(127);
    }
    close(fd);
}

/* ---- what the machine says ---- */

/* Until it is ready its answers go to the daemon; later nobody listens to it. */
static void tell(const uint8_t *text, size_t len)
{
    char line[512];
    if (answers < 0 || len == 0 || len >= sizeof line)
        return;
    for (size_t i = 0; i < len; i++)
        line[i] = text[i] >= ' ' || text[i] == '\t' ? (char)text[i] : '?';
    line[len] = '\n';
    (void)!write(answers, line, len + 1);
    if (len == 1 && *text == 'R') {
        up = true;
        close(answers);
        answers = -1;
        listener = 3;
    }
}

static bool send_steps(void)
{
    static uint8_t data[WIRE_MAX];
    struct sk_wire_start start;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    start.now = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    if (getrandom(start.seed, sizeof start.seed, 0) != sizeof start.seed)
        return false;
    memcpy(data, &start, sizeof start);
    ssize_t n = pread(STEPS, data + sizeof start, sizeof data - sizeof start, 0);
    return n > 0 && sk_wire_send(WIRE_STEPS, 0, data, sizeof start + (size_t)n);
}

static bool record(uint8_t kind, uint32_t number, const uint8_t *payload, size_t len)
{
    (void)number;
    if (kind == WIRE_HELLO)
        return !up && send_steps();
    if (kind == WIRE_TELL)
        tell(payload, len);
    else if (kind == WIRE_OOM && len == 8)
        (void)!pwrite(COUNTER, payload, len, 0);
    return true;
}

static bool accept_connection(void)
{
    if (sk_wire_unread())
        return true; /* what was said on the one before comes first */
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return true;
    sk_wire_connect(fd, ++serial);
    return sk_wire_send(WIRE_OPEN, serial, NULL, 0);
}

static bool child_ended(void)
{
    return false;
}

static void start_monitor(char **argv, int wire)
{
    pid_t pid = fork();
    if (pid < 0)
        _exit(1);
    if (pid == 0) {
        int log = fcntl(ERR, F_DUPFD_CLOEXEC, 200), disk = fcntl(DISK, F_DUPFD_CLOEXEC, 200);
        int tap = fcntl(TAP, F_DUPFD_CLOEXEC, 200);
        wire = fcntl(wire, F_DUPFD_CLOEXEC, 200);
        if (log >= 0 && wire >= 0 && dup2(wire, MONITOR_WIRE) >= 0 && dup2(disk, MONITOR_DISK) >= 0 &&
            dup2(tap, MONITOR_TAP) >= 0)
            execute(argv, log, MONITOR_TAP);
        _exit(127);
    }
}

_Noreturn void sk_become_machine(const struct sk_cursor *c)
{
    enum { PLACES = 6, PROGRAM = PLACES + 1 };
    static const int places[PLACES] = { OUT, ERR, STEPS, COUNTER, DISK, TAP };
    int pair[2], high[PLACES];
    int null = (int)sk_check(open("/dev/null", O_RDWR), "descriptors", "/dev/null");
    null = (int)sk_check(fcntl(null, F_DUPFD_CLOEXEC, 200), "descriptors", "null");
    for (int i = 0; i < PLACES; i++) {
        const char *slot = c->argv[1 + i];
        bool none = places[i] >= DISK && strcmp(slot, "-") == 0;
        int fd = none ? null : sk_slots[sk_slot("machine", slot)];
        high[i] = (int)sk_check(fcntl(fd, F_DUPFD_CLOEXEC, 200), "descriptors", slot);
    }
    sk_control_fd = (int)sk_check(fcntl(sk_control_fd, F_DUPFD_CLOEXEC, 200), "descriptors", "control");
    for (int fd = 0; fd < 3; fd++)
        sk_check(dup2(null, fd), "descriptors", "dup2");
    sk_check(dup3(sk_control_fd, 4, O_CLOEXEC), "descriptors", "dup3");
    sk_control_fd = 4;
    for (int i = 0; i < PLACES; i++)
        sk_check(dup3(high[i], places[i], O_CLOEXEC), "descriptors", "dup3");
    sk_check(syscall(NR_CLOSE_RANGE, TAP + 1u, LAST_FD, 0), "descriptors", "close_range");
    sk_check(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable", "");
    prctl(PR_SET_NAME, "skerry-machine", 0, 0, 0);
    int found = (int)sk_check(open(c->argv[PROGRAM], O_PATH | O_CLOEXEC), "machine", c->argv[PROGRAM]);
    close(found); /* said while somebody listens */
    sk_wait_for_the_last_word();
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        _exit(1);
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    start_monitor((char **)(uintptr_t)c->argv + PROGRAM, pair[1]);
    close(TAP); /* it is the monitor's alone, and goes with it */
    sigprocmask(SIG_BLOCK, &signals, NULL);
    ended = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    close(pair[1]);
    fcntl(3, F_SETFL, O_NONBLOCK);
    sk_wire_open(pair[0]);
    const struct sk_wire_side side = { .record = record,
                                       .other = { { &ended, child_ended, false },
                                                  { &listener, accept_connection, true } } };
    if (ended >= 0)
        sk_wire_run(&side);
    _exit(1); /* and with the first process everything else here ends */
}

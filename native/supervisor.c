/* Supervisors, and what happens between fork and exec.
 *
 * The guest forks a supervisor for each execution. The supervisor is a child subreaper and belongs to another
 * user than the workload where there is one; it starts the program by vfork, reports how that went and how the
 * program ended, and lives until nothing below it does. So "the tree is gone" is the event of its exit. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "applets.h"
#include "kernel.h"
#include "skerry.h"

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
        syscall(NR_CLOSE_RANGE, (unsigned)sk_roots.tmp_fd + 1, LAST_FD, 0);
        _exit(applet_run(s->applet, argc, s->argv, &sk_roots));
    }
    if (s->profile != NULL && sk_profile_apply(s, pty) < 0)
        return fail_step(SK_STEP_PROFILE);
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
    syscall(NR_CLOSE_RANGE, 1u, LAST_FD, 0);
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

const char *sk_step_text(int step)
{
    static const char *const steps[] = { "", "program", "working directory", "user", "fork", "limits", "profile" };
    return steps[step >= 0 && step <= SK_STEP_PROFILE ? step : 0];
}

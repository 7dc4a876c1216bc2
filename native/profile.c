/* The execution profile of one command: rules on paths (Landlock) and a filter of system calls (seccomp), which the
 * process puts on itself between fork and exec. Both stack on what the environment has, so they can only restrict.
 *
 * The environment's own filter leaves one answer to this guest: whether a process may install a filter. The guest
 * says yes to a process that is about to become a command with a profile, and no to all others. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernel.h"
#include "process.h"

#define FILTER_MAX 1024      /* instructions */
#define LANDLOCK_NEEDED 3    /* the first that covers truncation */
#define LANDLOCK_DEVICES 5
#define LANDLOCK_SCOPES 6
#define OF_FILES (ACCESS_EXECUTE | ACCESS_WRITE_FILE | ACCESS_READ_FILE | ACCESS_TRUNCATE | ACCESS_IOCTL_DEV)

struct entry { /* of getdents64 */
    uint64_t inode, next;
    uint16_t len;
    uint8_t type;
    char name[];
};

static int create_ruleset(uint64_t *access)
{
    int abi = (int)syscall(NR_LANDLOCK_CREATE, NULL, 0, LANDLOCK_ASK_VERSION);
    if (abi < LANDLOCK_NEEDED) {
        errno = EOPNOTSUPP;
        return -1;
    }
    if (abi < LANDLOCK_DEVICES)
        *access &= ~ACCESS_IOCTL_DEV;
    struct landlock_attributes attributes = { .fs = *access, .scoped = abi >= LANDLOCK_SCOPES ? 3 : 0 };
    size_t size = abi >= LANDLOCK_SCOPES ? sizeof attributes : sizeof attributes.fs;
    return (int)syscall(NR_LANDLOCK_CREATE, &attributes, size, 0u);
}

static int add_rule(int ruleset, int fd, uint64_t access)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return -1;
    struct landlock_rule rule = { .access = S_ISDIR(st.st_mode) ? access : access & OF_FILES, .parent = fd };
    return rule.access == 0 ? 0 : (int)syscall(NR_LANDLOCK_ADD, ruleset, LANDLOCK_BENEATH, &rule, 0u);
}

/* What lies in the directory on a file system that cannot be written. */
static int add_read_only_entries(int ruleset, const char *directory, uint64_t access)
{
    char buffer[4096] __attribute__((aligned(8)));
    int added = 0, at = open(directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (at < 0)
        return errno == ENOENT || errno == EACCES ? 0 : -1;
    for (long n; added == 0 && (n = syscall(SYS_getdents64, at, buffer, sizeof buffer)) != 0;) {
        if (n < 0)
            added = -1;
        const struct entry *e;
        for (long i = 0; added == 0 && i < n; i += e->len) {
            struct statvfs fs;
            struct stat st;
            e = (const struct entry *)(const void *)(buffer + i);
            if (strcmp(e->name, ".") == 0 || strcmp(e->name, "..") == 0)
                continue;
            int fd = openat(at, e->name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
            if (fd < 0)
                continue;
            if (fstat(fd, &st) == 0 && (S_ISDIR(st.st_mode) || S_ISREG(st.st_mode)) && fstatvfs(fd, &fs) == 0 &&
                (fs.f_flag & ST_RDONLY))
                added = add_rule(ruleset, fd, access);
            close(fd);
        }
    }
    close(at);
    return added;
}

/* A path that does not exist, or that a symlink stands in, gets no rule: nothing is granted there. */
static int add_path(int ruleset, char *path, uint64_t access)
{
    size_t len = strlen(path);
    if (len > 1 && strcmp(path + len - 2, "/*") == 0) {
        path[len == 2 ? 1 : len - 2] = 0;
        return add_read_only_entries(ruleset, path, access);
    }
    struct open_request how = { .flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_SYMLINKS_NOT };
    int fd = (int)syscall(NR_OPENAT2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0)
        return errno == ENOENT || errno == ELOOP || errno == ENOTDIR || errno == EACCES ? 0 : -1;
    int added = add_rule(ruleset, fd, access);
    close(fd);
    return added;
}

static int install(const struct sk_field *filter)
{
    static struct filter_instruction code[FILTER_MAX];
    struct filter_program program = { .len = (unsigned short)(filter->len / sizeof *code), .filter = code };
    memcpy(code, filter->data, filter->len);
    return (int)syscall(SYS_seccomp, SECCOMP_INSTALL, 0, &program);
}

int sk_profile_apply(const struct sk_start *start, bool pty)
{
    struct sk_reader reader = { start->profile, start->profile_len };
    struct sk_field f, filter = { 0, NULL, 0 };
    uint64_t access = 0;
    int ruleset = -1;
    while (sk_next_field(&reader, &f)) {
        int done = 0;
        if (f.tag == SK_TAG_FILTER && filter.data == NULL && f.len > 0 && f.len % sizeof(struct filter_instruction) == 0 &&
            f.len / sizeof(struct filter_instruction) <= FILTER_MAX) {
            filter = f;
        } else if (f.tag == SK_TAG_ACCESS && ruleset < 0 && f.len == 8) {
            access = sk_get64(f.data);
            done = ruleset = create_ruleset(&access);
        } else if (f.tag == SK_TAG_RULE && ruleset >= 0 && f.len > 9 && f.data[8] == '/' &&
                   memchr(f.data + 8, 0, f.len - 8) == f.data + f.len - 1) {
            done = add_path(ruleset, (char *)(uintptr_t)f.data + 8, sk_get64(f.data) & access);
        } else {
            errno = EBADMSG;
            return -1;
        }
        if (done < 0)
            return -1;
    }
    if (reader.left > 0 || filter.data == NULL) {
        errno = EBADMSG;
        return -1;
    }
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return -1;
    if (ruleset >= 0) {
        if (pty && add_rule(ruleset, 0, access & OF_FILES & ~ACCESS_EXECUTE) < 0) /* its own terminal, by whatever name */
            return -1;
        if (syscall(NR_LANDLOCK_RESTRICT, ruleset, 0u) < 0)
            return -1;
        close(ruleset);
    }
    return install(&filter);
}

/* ---- who may install a filter ---- */

static void asked(struct sk_source *source, uint32_t events)
{
    struct seccomp_question question = { 0 };
    struct seccomp_answer answer = { 0 };
    errno = 0;
    if (!(events & EPOLLIN) || syscall(SYS_ioctl, source->fd, SECCOMP_RECEIVE, &question) < 0) {
        if (errno != ENOENT && errno != EINTR) /* else the process that asked is gone */
            sk_unwatch(source);                /* from now on the kernel says no to all */
        return;
    }
    answer.id = question.id;
    if (sk_process_begins((pid_t)question.pid))
        answer.flags = SECCOMP_CONTINUE;
    else
        answer.error = -EINVAL;
    syscall(SYS_ioctl, source->fd, SECCOMP_SEND, &answer);
}

void sk_profile_serve(int fd)
{
    static struct sk_source questions;
    questions = (struct sk_source){ .fd = fd, .ready = asked };
    sk_watch(&questions, EPOLLIN);
}

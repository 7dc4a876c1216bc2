/*
 * Path resolution that never leaves a root directory.
 *
 * Everything below the workspace belongs to the workload, which renames directories and swaps them for
 * symlinks while we look. A path is therefore never checked first and used afterwards: the kernel resolves
 * it in one go with openat2(RESOLVE_BENEATH), which refuses every way out (absolute symlinks, "..", magic
 * links) at the moment it would be taken. Whatever then happens, happens relative to the descriptor.
 *
 * Where openat2 is missing, filtered, or starved by renames elsewhere (EAGAIN), a walk by hand gives the
 * same answers: one component at a time with O_NOFOLLOW, symlinks read and followed as text.
 */
#define _GNU_SOURCE
#include "paths.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RACE_RETRIES 64  /* openat2 gives EAGAIN when any rename on the machine meets our ".." */
#define MAX_SYMLINKS 40  /* as the kernel */
#define MAX_STEPS 20000  /* of the walk by hand: ".." makes it start over, a hostile tree many times */

#ifndef SYS_openat2
#define SYS_openat2 437
#endif

/* <linux/openat2.h>, which musl does not bring along. */
struct open_how {
    uint64_t flags, mode, resolve;
};
#define RESOLVE_NO_MAGICLINKS 0x02
#define RESOLVE_BENEATH 0x08

/* ---- Text ---- */

static bool is_dots(const char *name, size_t len, size_t dots)
{
    return len == dots && memcmp(name, "..", dots) == 0;
}

/* The part of `abs` below the directory `root`, "." if they are the same, NULL if it is not below. */
static const char *below(const char *abs, const char *root)
{
    size_t len = strlen(root);
    if (strncmp(abs, root, len) != 0)
        return NULL;
    if (abs[len] == '\0')
        return ".";
    return abs[len] == '/' ? abs + len + 1 : NULL;
}

int sk_path_split(const struct sk_roots *roots, const char *path, size_t len, int *root_fd,
                  char rel[PATH_MAX])
{
    if (len == 0 || len >= PATH_MAX || memchr(path, '\0', len) != NULL)
        return -EINVAL;

    char abs[2 * PATH_MAX];
    size_t used = 0;
    if (path[0] != '/') {
        used = strlen(roots->workspace_path);
        if (used >= PATH_MAX)
            return -EINVAL;
        memcpy(abs, roots->workspace_path, used);
    }
    for (size_t at = 0; at < len;) {
        const char *slash = memchr(path + at, '/', len - at);
        size_t n = slash != NULL ? (size_t)(slash - path) - at : len - at;
        if (is_dots(path + at, n, 2)) {
            while (used > 0 && abs[--used] != '/')
                ;
        } else if (n > 0 && !is_dots(path + at, n, 1)) {
            abs[used++] = '/';
            memcpy(abs + used, path + at, n);
            used += n;
        }
        at += n + 1;
    }
    abs[used] = '\0';

    *root_fd = roots->workspace_fd;
    const char *found = below(abs, roots->workspace_path);
    if (found == NULL) {
        *root_fd = roots->tmp_fd;
        found = below(abs, roots->tmp_path);
    }
    if (found == NULL)
        return -EXDEV;
    if (strlen(found) >= PATH_MAX)
        return -EINVAL;
    strcpy(rel, found);
    return 0;
}

/* ---- The walk by hand ---- */

/* Moves the first component of `path` to `name`; an empty path is ".". */
static int take_name(char *path, char name[NAME_MAX + 1])
{
    size_t len = strcspn(path, "/"), next = len + strspn(path + len, "/");
    if (len > NAME_MAX)
        return -ENAMETOOLONG;
    memcpy(name, path, len);
    strcpy(name + len, len == 0 ? "." : "");
    memmove(path, path + next, strlen(path + next) + 1);
    return 0;
}

/* Joins `front` and `path` with a slash, into `path`. */
static int prepend(char path[PATH_MAX], const char *front, size_t len)
{
    size_t old = strlen(path), gap = len + (len > 0 && old > 0);
    if (gap + old >= PATH_MAX)
        return -ENAMETOOLONG;
    memmove(path + gap, path, old + 1);
    memcpy(path, front, len);
    if (gap > len)
        path[len] = '/';
    return 0;
}

/* gVisor follows a symlink for O_DIRECTORY | O_NOFOLLOW, though not with O_PATH: that tells what is there. */
int sk_open_directory(int dir_fd, const char *name, int flags)
{
    struct stat there, opened;
    int place = openat(dir_fd, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (place < 0)
        return -1;
    int fd = openat(dir_fd, name, flags), error = errno;
    if (fd >= 0 && (fstat(place, &there) < 0 || fstat(fd, &opened) < 0 || there.st_dev != opened.st_dev ||
                    there.st_ino != opened.st_ino)) {
        close(fd);
        fd = -1;
        error = ELOOP;
    }
    close(place);
    errno = error;
    return fd;
}

/* `done` is the way from the root to `dir` (-1: the root itself), free of symlinks; `todo` is the rest. */
static int open_by_hand(int root_fd, const char *rel, int flags, mode_t mode)
{
    char done[PATH_MAX] = "", todo[PATH_MAX], target[PATH_MAX], name[NAME_MAX + 1];
    bool follow_last = !(flags & O_NOFOLLOW) && (flags & (O_CREAT | O_EXCL)) != (O_CREAT | O_EXCL);
    int dir = -1, links = 0, result = rel[0] == '/' ? -EXDEV : 0;

    strcpy(todo, rel);
    for (int steps = 0; result == 0; steps++) {
        int at = dir >= 0 ? dir : root_fd;
        if ((result = steps < MAX_STEPS ? take_name(todo, name) : -ELOOP) < 0)
            break;
        if (strcmp(name, "..") == 0) {
            if (done[0] == '\0') {
                result = -EXDEV;
                break;
            }
            /* The ".." of a directory that was moved meanwhile is outside: walk again from the root. */
            char *slash = strrchr(done, '/');
            result = prepend(todo, done, slash != NULL ? (size_t)(slash - done) : 0);
            done[0] = '\0';
            close(dir);
            dir = -1;
            continue;
        }
        bool last = todo[0] == '\0';
        ssize_t n = !last || follow_last ? readlinkat(at, name, target, sizeof target) : -1;
        if (n > 0) {
            result = target[0] == '/'          ? -EXDEV
                     : ++links > MAX_SYMLINKS ? -ELOOP
                                              : prepend(todo, target, (size_t)n);
            continue;
        }
        int fd = !last ? openat(at, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
                 : (flags & (O_DIRECTORY | O_PATH)) == O_DIRECTORY
                     ? sk_open_directory(at, name, flags | O_NOFOLLOW)
                     : openat(at, name, flags | O_NOFOLLOW, mode);
        if (fd < 0 || last) {
            result = fd < 0 ? -errno : fd;
            break;
        }
        if (dir >= 0)
            close(dir);
        dir = fd;
        size_t used = strlen(done);
        if (strcmp(name, ".") == 0)
            continue;
        if (used + 1 + strlen(name) >= PATH_MAX)
            result = -ENAMETOOLONG;
        else
            strcpy(stpcpy(done + used, used > 0 ? "/" : ""), name);
    }
    if (dir >= 0)
        close(dir);
    return result;
}

/* ---- Opening ---- */

static int open_by_kernel(int root_fd, const char *rel, int flags, mode_t mode)
{
    struct open_how how = {
        .flags = (uint64_t)flags,
        .mode = flags & O_CREAT ? mode & 07777 : 0,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
    };
#ifdef SK_TEST
    if (getenv("SK_TEST_NO_OPENAT2") != NULL)
        return -ENOSYS;
#endif
    for (int i = 0; i < RACE_RETRIES; i++) {
        long fd = syscall(SYS_openat2, root_fd, rel, &how, sizeof how);
        if (fd >= 0 || errno != EAGAIN)
            return fd < 0 ? -errno : (int)fd;
    }
    return -EAGAIN;
}

static int open_beneath(int root_fd, const char *rel, int flags, mode_t mode)
{
    flags |= flags & O_PATH ? O_CLOEXEC : O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
    int fd = open_by_kernel(root_fd, rel, flags, mode);
    /* EPERM: what older container filters say to a call that they do not know. */
    return fd == -ENOSYS || fd == -EPERM || fd == -EAGAIN ? open_by_hand(root_fd, rel, flags, mode) : fd;
}

/* A path longer than the kernel takes at once is opened in pieces, each beneath the one before. */
static int open_len(int root_fd, const char *rel, size_t len, int flags, mode_t mode)
{
    char part[PATH_MAX];
    for (int dir = root_fd;;) {
        bool last = len < PATH_MAX;
        size_t n = last ? len : PATH_MAX - 1;
        while (!last && n > 0 && rel[n] != '/')
            n--;
        memcpy(part, rel, n);
        part[n] = '\0';
        int fd = last    ? open_beneath(dir, part, flags, mode)
                 : n > 0 ? open_beneath(dir, part, O_PATH | O_DIRECTORY, 0)
                         : -ENAMETOOLONG;
        if (dir != root_fd)
            close(dir);
        if (last || fd < 0)
            return fd;
        dir = fd;
        rel += n + 1;
        len -= n + 1;
    }
}

int sk_open(int root_fd, const char *rel, int flags, mode_t mode)
{
    return open_len(root_fd, rel, strlen(rel), flags, mode);
}

int sk_open_regular(int root_fd, const char *rel, int flags, mode_t mode)
{
    /* O_NONBLOCK makes opening a FIFO return at once, without effect on it. */
    int fd = sk_open(root_fd, rel, flags, mode);
    struct stat st;
    if (fd < 0)
        return fd;
    int error = fstat(fd, &st) < 0 ? errno : S_ISREG(st.st_mode) ? 0 : S_ISDIR(st.st_mode) ? EISDIR : ENXIO;
    if (error == 0)
        return fd;
    close(fd);
    return -error;
}

int sk_open_parent(int root_fd, const char *rel, const char **name)
{
    const char *slash = strrchr(rel, '/');
    if (strcmp(rel, ".") == 0)
        return -EBUSY;
    *name = slash != NULL ? slash + 1 : rel;
    return slash != NULL ? open_len(root_fd, rel, (size_t)(slash - rel), O_PATH | O_DIRECTORY, 0)
                         : open_len(root_fd, ".", 1, O_PATH | O_DIRECTORY, 0);
}

int sk_mkdirs(int root_fd, const char *rel, mode_t mode)
{
    size_t len = strlen(rel), have = len;
    int dir;
    /* Most often all or all but the last exist: look from the far end for one that does. */
    while ((dir = have > 0 ? open_len(root_fd, rel, have, O_PATH | O_DIRECTORY, 0)
                           : open_len(root_fd, ".", 1, O_PATH | O_DIRECTORY, 0)) == -ENOENT && have > 0)
        while (have > 0 && rel[--have] != '/')
            ;
    while (dir >= 0 && have < len) {
        char name[NAME_MAX + 1];
        const char *start = rel + have + (rel[have] == '/');
        size_t n = strcspn(start, "/");
        int next = -ENAMETOOLONG;
        if (n <= NAME_MAX) {
            memcpy(name, start, n);
            name[n] = '\0';
            next = mkdirat(dir, name, mode) == 0 || errno == EEXIST
                       ? sk_open(dir, name, O_PATH | O_DIRECTORY, 0)
                       : -errno;
        }
        close(dir);
        dir = next;
        have = (size_t)(start - rel) + n;
    }
    if (dir < 0)
        return dir;
    close(dir);
    return 0;
}

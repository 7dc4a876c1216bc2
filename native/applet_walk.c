/*
 * A walk through a tree that others change meanwhile.
 *
 * Directories are entered one component at a time with O_NOFOLLOW, relative to their parent's descriptor,
 * so that no swap of a directory for a symlink leads out. Only the nearest OPEN_LEVELS directories stay
 * open; one further up is closed, and found again on the way back by its child's "..", which must then be
 * the very same inode, and continued where it was left.
 */
#define _GNU_SOURCE
#include "applet_common.h"
#include "paths.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define OPEN_LEVELS 32
#define OPEN_DIRECTORY (O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK)

#ifndef SYS_fchmodat2
#define SYS_fchmodat2 452
#endif

struct walk_level {
    DIR *dir;  /* NULL: closed, to be continued at `position` */
    long position;
    dev_t dev;
    ino_t ino;
    size_t path_len;
};

static int push(struct walk *w, int fd)
{
    if (w->depth == w->room) {
        size_t room = w->room + OPEN_LEVELS;
        struct walk_level *levels = realloc(w->levels, room * sizeof *levels);
        if (levels == NULL)
            applet_fail(ENOMEM, w->path);
        w->levels = levels;
        w->room = room;
    }
    struct stat st;
    DIR *dir = fstat(fd, &st) == 0 ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        int error = errno;
        close(fd);
        return -error;
    }
    if (w->depth >= OPEN_LEVELS) {
        struct walk_level *far = &w->levels[w->depth - OPEN_LEVELS];
        far->position = telldir(far->dir);
        closedir(far->dir);
        far->dir = NULL;
    }
    w->levels[w->depth++] = (struct walk_level){
        .dir = dir, .dev = st.st_dev, .ino = st.st_ino, .path_len = strlen(w->path)};
    return 0;
}

static int reopen(struct walk_level *level, int child_fd)
{
    struct stat st;
    int fd = openat(child_fd, "..", OPEN_DIRECTORY);
    if (fd < 0)
        return errno;
    bool same = fstat(fd, &st) == 0 && st.st_dev == level->dev && st.st_ino == level->ino;
    if (!same || (level->dir = fdopendir(fd)) == NULL) {
        close(fd);
        return ESTALE;
    }
    seekdir(level->dir, level->position);
    return 0;
}

void walk_start(struct walk *w, int fd, const char *prefix)
{
    w->levels = NULL;
    w->depth = w->room = 0;
    strcpy(w->path, prefix);
    int error = push(w, fd);
    if (error < 0)
        applet_fail(-error, prefix);
}

static enum walk_event finish(struct walk *w)
{
    while (w->depth > 0) {
        DIR *dir = w->levels[--w->depth].dir;
        if (dir != NULL)
            closedir(dir);
    }
    free(w->levels);
    w->levels = NULL;
    return WALK_DONE;
}

static enum walk_event leave(struct walk *w)
{
    struct walk_level *child = &w->levels[w->depth - 1], *parent = child - 1;
    if (w->depth == 1)
        return finish(w);
    int error = parent->dir == NULL ? reopen(parent, dirfd(child->dir)) : 0;
    w->path[child->path_len] = '\0';
    if (error != 0) {
        applet_complain(error, w->path);
        return finish(w);
    }
    closedir(child->dir);
    w->depth--;
    w->dir_fd = dirfd(parent->dir);
    w->name = w->path + parent->path_len + (parent->path_len > 0);
    w->fits = true;
    return WALK_LEFT;
}

enum walk_event walk_next(struct walk *w)
{
    struct walk_level *top = &w->levels[w->depth - 1];
    struct dirent *entry;
    do {
        errno = 0;
        entry = readdir(top->dir);
    } while (entry != NULL && (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0));
    w->path[top->path_len] = '\0';
    if (entry == NULL) {
        if (errno != 0)
            applet_complain(errno, w->path);
        return leave(w);
    }
    w->dir_fd = dirfd(top->dir);
    w->name = entry->d_name;
    w->fits = top->path_len + 1 + strlen(entry->d_name) <= SK_NAME_LIMIT;
    if (w->fits)
        strcpy(stpcpy(w->path + top->path_len, top->path_len > 0 ? "/" : ""), entry->d_name);
    return WALK_ENTRY;
}

/* Without permission to read it a directory opens as O_PATH alone, which fchmod does not take. */
static int unlock(int dir_fd, const char *name)
{
    char magic[32];
    int fd = -1, path_fd = openat(dir_fd, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (path_fd < 0)
        return -1;
    snprintf(magic, sizeof magic, "/proc/self/fd/%d", path_fd);
    if (syscall(SYS_fchmodat2, path_fd, "", 0700, AT_EMPTY_PATH) == 0 || chmod(magic, 0700) == 0)
        fd = openat(path_fd, ".", OPEN_DIRECTORY);
    else
        errno = EACCES;
    int error = errno;
    close(path_fd);
    errno = error;
    return fd;
}

int walk_open(int dir_fd, const char *name, bool force)
{
    struct stat st;
    int fd = sk_open_directory(dir_fd, name, OPEN_DIRECTORY);
    if (fd < 0 && errno == EACCES && force)
        fd = unlock(dir_fd, name);
    if (fd < 0)
        return -errno;
    /* Best effort: what it was needed for tells whether it was enough. */
    if (force && fstat(fd, &st) == 0 && (st.st_mode & 0700) != 0700)
        (void)!fchmod(fd, 0700);
    return fd;
}

int walk_enter(struct walk *w, bool force)
{
    if (!w->fits)
        return -ENAMETOOLONG;
    int fd = walk_open(w->dir_fd, w->name, force);
    return fd < 0 ? fd : push(w, fd);
}

bool walk_vanished(int error)
{
    return error == ENOENT || error == ENOTDIR || error == ELOOP;
}

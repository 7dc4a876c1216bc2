/* Files that stay open from one frame to the next, under a number that the host chooses.
 *
 * A file that is read in many frames stays open from the first to the last, so that a file which is replaced meanwhile
 * is read as it was. New content of many frames is collected in a file without a name (O_TMPFILE), which gets the name
 * with its last frame: until then the old file is there, and content that is given up leaves nothing. Where the
 * directory or the old file does not allow that, and for content that begins at an offset, the file itself is written.
 * A file system without such files (gVisor's) has one with a name of its own instead.
 *
 * A handle is closed at the end, when the host gives it up, and when the connection is lost. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files.h"

#define HANDLES_MAX 256
#define BESIDE_MAX 40

static struct handle {
    uint32_t number; /* 0: free */
    int fd;
    int dir;    /* where new content gets its name; -1: it has one */
    char *name; /* NULL without `dir` */
    char beside[BESIDE_MAX]; /* what it is called in `dir` until then; empty: nothing */
} handles[HANDLES_MAX];

static struct handle *find(uint32_t number)
{
    for (size_t i = 0; i < HANDLES_MAX; i++)
        if (handles[i].number == number)
            return &handles[i];
    return NULL;
}

static void drop(struct handle *h)
{
    close(h->fd);
    if (*h->beside != 0)
        unlinkat(h->dir, h->beside, 0);
    if (h->dir >= 0)
        close(h->dir);
    free(h->name);
    *h = (struct handle){ 0 };
}

void sk_handle_drop(uint32_t number)
{
    struct handle *h = number != 0 ? find(number) : NULL;
    if (h != NULL)
        drop(h);
}

int sk_handle_fd(uint32_t number)
{
    struct handle *h = number != 0 ? find(number) : NULL;
    return h != NULL ? h->fd : -EBADF;
}

void sk_file_disconnected(void)
{
    for (size_t i = 0; i < HANDLES_MAX; i++)
        if (handles[i].number != 0)
            drop(&handles[i]);
}

/* Takes the descriptors and the name, and lets go of them if it fails. */
static int keep(struct handle kept, const char *name)
{
    struct handle *h = find(kept.number) == NULL ? find(0) : NULL;
    int error = EMFILE;
    if (h != NULL && kept.dir >= 0 && (kept.name = strdup(name)) == NULL) {
        h = NULL;
        error = ENOMEM;
    }
    if (h == NULL) {
        drop(&kept);
        return -error;
    }
    *h = kept;
    return 0;
}

int sk_handle_keep(uint32_t number, int fd)
{
    return keep((struct handle){ .number = number, .fd = fd, .dir = -1 }, NULL);
}

int sk_handle_write_at(int fd, const struct sk_request *r)
{
    for (size_t done = 0; done < r->data_len;) {
        ssize_t n = pwrite(fd, r->data + done, r->data_len - done, (off_t)(r->offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        done += (size_t)n;
    }
    return 0;
}

/* The directory (O_PATH) that holds the file which `rel` leads to, behind symlinks too, and its name there. `old` is
 * that file, or negative. */
static int directory_of(int root, const char *rel, int old, char name[NAME_MAX + 1])
{
    char link[32], path[PATH_MAX], target[PATH_MAX];
    const char *last;
    struct stat here, there;
    if (old >= 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", old);
        ssize_t n = readlink(link, path, sizeof path);
        if (n <= 0 || sk_path_split(&sk_roots, path, (size_t)n, &root, target) < 0)
            return -1;
        rel = target;
    }
    int dir = sk_open_parent(root, rel, &last);
    if (dir < 0)
        return -1;
    bool same = old >= 0 ? fstat(old, &there) == 0 && fstatat(dir, last, &here, AT_SYMLINK_NOFOLLOW) == 0 &&
                               here.st_dev == there.st_dev && here.st_ino == there.st_ino
                         : fstatat(dir, last, &here, AT_SYMLINK_NOFOLLOW) < 0;
    if (same && strlen(last) <= NAME_MAX) {
        strcpy(name, last);
        return dir;
    }
    close(dir);
    return -1;
}

static void name_beside(char beside[BESIDE_MAX], uint32_t number)
{
    snprintf(beside, BESIDE_MAX, ".skerry-%08x-%llx", number, (unsigned long long)sk_now_ms());
}

/* Opens a file in `h->dir` that can take the place of `old`, if there is one; false if none can: `old` has other names,
 * belongs to somebody else, or its directory is not ours to write to. */
static bool open_spare(struct handle *h, int old)
{
    struct stat st, made;
    if (old >= 0 && (fstat(old, &st) < 0 || st.st_nlink != 1))
        return false;
    h->fd = openat(h->dir, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0644);
    if (h->fd < 0 && (errno == EISDIR || errno == EOPNOTSUPP)) {
        name_beside(h->beside, h->number);
        h->fd = openat(h->dir, h->beside, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0644);
    }
    if (h->fd < 0 || old < 0)
        return h->fd >= 0;
    if (fstat(h->fd, &made) == 0 && made.st_uid == st.st_uid &&
        (made.st_gid == st.st_gid || fchown(h->fd, (uid_t)-1, st.st_gid) == 0) &&
        fchmod(h->fd, st.st_mode & 07777) == 0)
        return true;
    close(h->fd);
    if (*h->beside != 0)
        unlinkat(h->dir, h->beside, 0);
    return false;
}

/* Opens what new content goes to: a spare file, with its directory and `name` for later, or the file itself. Returns
 * its descriptor. */
static int open_new(int root, const char *rel, struct handle *h, char name[NAME_MAX + 1])
{
    int old = sk_open_regular(root, rel, O_WRONLY, 0);
    if (old < 0 && old != -ENOENT)
        return old;
    h->dir = directory_of(root, rel, old, name);
    if (h->dir >= 0 && open_spare(h, old)) {
        if (old >= 0)
            close(old);
        return h->fd;
    }
    if (h->dir >= 0)
        close(h->dir);
    h->dir = -1;
    *h->beside = 0;
    if (old < 0)
        return sk_open_regular(root, rel, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (ftruncate(old, 0) == 0)
        return old;
    int error = errno;
    close(old);
    return -error;
}

static int begin(int root, const char *rel, const struct sk_request *r)
{
    char name[NAME_MAX + 1];
    struct handle h = { .number = r->handle, .dir = -1 };
    if (find(0) == NULL || find(r->handle) != NULL) /* before a file is emptied that could not be written */
        return -EMFILE;
    h.fd = r->flags & SK_FLAG_KEEP ? sk_open_in_place(root, rel) : open_new(root, rel, &h, name);
    return h.fd < 0 ? h.fd : keep(h, name);
}

/* Gives new content its name. Whatever has that name goes, at the same moment. */
static int commit(struct handle *h)
{
    char link[32];
    if (h->dir < 0)
        return 0;
    if (*h->beside == 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", h->fd);
        if (linkat(AT_FDCWD, link, h->dir, h->name, AT_SYMLINK_FOLLOW) == 0)
            return 0;
        if (errno != EEXIST)
            return -errno;
        /* A link cannot replace a name, and a rename needs one. */
        char beside[BESIDE_MAX];
        name_beside(beside, h->number);
        if (linkat(AT_FDCWD, link, h->dir, beside, AT_SYMLINK_FOLLOW) < 0)
            return -errno;
        strcpy(h->beside, beside);
    }
    if (renameat(h->dir, h->beside, h->dir, h->name) < 0)
        return -errno;
    *h->beside = 0;
    return 0;
}

int sk_handle_write(int root, const char *rel, const struct sk_request *r)
{
    if (r->flags & (SK_FLAG_TRUNCATE | SK_FLAG_KEEP)) {
        int begun = begin(root, rel, r);
        if (begun < 0)
            return begun;
    }
    struct handle *h = find(r->handle);
    if (h == NULL)
        return -EBADF;
    int result = r->flags & SK_FLAG_ABORT ? 0 : sk_handle_write_at(h->fd, r);
    if (result == 0 && r->flags & SK_FLAG_COMMIT)
        result = commit(h);
    if (result < 0 || r->flags & (SK_FLAG_COMMIT | SK_FLAG_ABORT))
        drop(h);
    return result;
}

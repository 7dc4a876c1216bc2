/* File operations that are short enough for the event loop: one open, at most one chunk of data.
 *
 * A file is written in one of two ways. Content of one frame is written in place, after its room has been
 * reserved. Content of many frames is collected in a file without a name (O_TMPFILE), which gets the name with
 * its last frame: until then the old file is there, and a collection that is given up leaves nothing. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "applets.h"
#include "skerry.h"

struct request {
    const uint8_t *path, *path2, *data;
    size_t path_len, path2_len, data_len;
    uint64_t offset;
    uint32_t length, flags, handle;
};

#define COLLECTIONS_MAX 64

/* Content under way. Without a directory it goes to the file itself. */
static struct collection {
    uint32_t handle; /* the host's; 0: free */
    int fd, dir;
    char name[NAME_MAX + 1];
} collections[COLLECTIONS_MAX];

static uint8_t reply[SK_PAYLOAD_MAX];
_Static_assert(SK_STAT_RECORD_MAX <= SK_PAYLOAD_MAX, "a record fits into a reply");

static bool decode(const uint8_t *payload, size_t len, struct request *r)
{
    struct sk_reader reader = { payload, len };
    struct sk_field f;
    memset(r, 0, sizeof *r);
    while (sk_next_field(&reader, &f)) {
        if (f.tag == SK_TAG_PATH) {
            r->path = f.data;
            r->path_len = f.len;
        } else if (f.tag == SK_TAG_PATH2) {
            r->path2 = f.data;
            r->path2_len = f.len;
        } else if (f.tag == SK_TAG_DATA) {
            r->data = f.data;
            r->data_len = f.len;
        } else if (f.tag == SK_TAG_OFFSET && f.len == 8) {
            r->offset = sk_get64(f.data);
        } else if (f.tag == SK_TAG_LENGTH && f.len == 4) {
            r->length = sk_get32(f.data);
        } else if (f.tag == SK_TAG_FLAGS && f.len == 4) {
            r->flags = sk_get32(f.data);
        } else if (f.tag == SK_TAG_HANDLE && f.len == 4) {
            r->handle = sk_get32(f.data);
        } else {
            return false;
        }
    }
    return reader.left == 0 && r->path != NULL && r->offset <= INT64_MAX;
}

static int make_parents(int root, char *rel)
{
    char *slash = strrchr(rel, '/');
    if (slash == NULL)
        return 0;
    *slash = 0;
    int result = sk_mkdirs(root, rel, 0755);
    *slash = '/';
    return result;
}

static int read_file(int root, const char *rel, const struct request *r)
{
    int fd = sk_open_regular(root, rel, O_RDONLY, 0);
    if (fd < 0)
        return fd;
    size_t want = r->length < sizeof reply ? r->length : sizeof reply, have = 0;
    while (have < want) {
        ssize_t n = pread(fd, reply + have, want - have, (off_t)(r->offset + have));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            int error = errno;
            close(fd);
            return -error;
        }
        if (n == 0)
            break;
        have += (size_t)n;
    }
    close(fd);
    return (int)have;
}

static int write_at(int fd, const struct request *r)
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

/* Replaces the content by that of one frame. Where there is no room for it, the old content stays. */
static int overwrite(int fd, const struct request *r)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return -errno;
    if (st.st_size > 0 && r->data_len > (uint64_t)st.st_blocks * 512 &&
        fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)r->data_len) < 0 && errno != EOPNOTSUPP && errno != EINTR)
        return -errno;
    int result = write_at(fd, r);
    if (result == 0 && st.st_size > (off_t)r->data_len && ftruncate(fd, (off_t)r->data_len) < 0)
        result = -errno;
    return result;
}

static int write_file(int root, const char *rel, const struct request *r)
{
    struct statvfs fs;
    int fd = sk_open_regular(root, rel, O_WRONLY | O_CREAT, 0644);
    /* Without O_TRUNC the kernel looks at the file's mode first, which is not what the caller can change. */
    if (fd == -EACCES && fstatvfs(root, &fs) == 0 && fs.f_flag & ST_RDONLY)
        return -EROFS;
    if (fd < 0)
        return fd;
    int result = r->flags & SK_FLAG_TRUNCATE ? overwrite(fd, r) : write_at(fd, r);
    if (close(fd) < 0 && result == 0)
        result = -errno;
    return result;
}

/* ---- content of many frames ---- */

static struct collection *find_collection(uint32_t handle)
{
    for (size_t i = 0; i < COLLECTIONS_MAX; i++)
        if (collections[i].handle == handle)
            return &collections[i];
    return NULL;
}

static void drop(struct collection *c)
{
    close(c->fd);
    if (c->dir >= 0)
        close(c->dir);
    c->handle = 0;
}

void sk_file_disconnected(void)
{
    for (size_t i = 0; i < COLLECTIONS_MAX; i++)
        if (collections[i].handle != 0)
            drop(&collections[i]);
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

/* A file without a name that can take the place of `old`, if there is one; negative if none can: `old` has other names,
 * belongs to somebody else, or its directory is not ours to write to. */
static int open_nameless(int dir, int old)
{
    struct stat st, made;
    if (old >= 0 && (fstat(old, &st) < 0 || st.st_nlink != 1))
        return -1;
    int fd = openat(dir, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0644);
    if (fd < 0 || old < 0)
        return fd;
    if (fstat(fd, &made) == 0 && made.st_uid == st.st_uid &&
        (made.st_gid == st.st_gid || fchown(fd, (uid_t)-1, st.st_gid) == 0) && fchmod(fd, st.st_mode & 07777) == 0)
        return fd;
    close(fd);
    return -1;
}

static int begin(int root, const char *rel, const struct request *r)
{
    struct collection *c = find_collection(0);
    if (c == NULL || find_collection(r->handle) != NULL)
        return -EMFILE;
    int old = sk_open_regular(root, rel, O_WRONLY, 0);
    if (old < 0 && old != -ENOENT)
        return old;
    int dir = directory_of(root, rel, old, c->name);
    int fd = dir >= 0 ? open_nameless(dir, old) : -1;
    if (fd < 0 && dir >= 0) {
        close(dir);
        dir = -1;
    }
    if (fd >= 0) {
        if (old >= 0)
            close(old);
    } else if (old < 0) {
        fd = sk_open_regular(root, rel, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    } else {
        fd = ftruncate(old, 0) < 0 ? -errno : old;
        if (fd < 0)
            close(old);
    }
    if (fd < 0)
        return fd;
    c->handle = r->handle;
    c->fd = fd;
    c->dir = dir;
    return 0;
}

/* Gives the content its name. Whatever has that name goes, at the same moment. */
static int commit(const struct collection *c)
{
    char link[32], beside[64];
    if (c->dir < 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", c->fd);
    if (linkat(AT_FDCWD, link, c->dir, c->name, AT_SYMLINK_FOLLOW) == 0)
        return 0;
    if (errno != EEXIST)
        return -errno;
    /* A link cannot replace a name, and a rename needs one. */
    snprintf(beside, sizeof beside, ".skerry-%08x-%llx", c->handle, (unsigned long long)sk_now_ms());
    if (linkat(AT_FDCWD, link, c->dir, beside, AT_SYMLINK_FOLLOW) < 0)
        return -errno;
    if (renameat(c->dir, beside, c->dir, c->name) == 0)
        return 0;
    int error = errno;
    unlinkat(c->dir, beside, 0);
    return -error;
}

static int collect(int root, const char *rel, const struct request *r)
{
    if (r->flags & SK_FLAG_TRUNCATE) {
        int begun = begin(root, rel, r);
        if (begun < 0)
            return begun;
    }
    struct collection *c = find_collection(r->handle);
    if (c == NULL)
        return -EBADF;
    int result = r->flags & SK_FLAG_ABORT ? 0 : write_at(c->fd, r);
    if (result == 0 && r->flags & SK_FLAG_COMMIT)
        result = commit(c);
    if (result < 0 || r->flags & (SK_FLAG_COMMIT | SK_FLAG_ABORT))
        drop(c);
    return result;
}

static int stat_file(int root, const char *rel)
{
    struct stat st;
    char target[PATH_MAX];
    ssize_t target_len = 0;
    const char *name;
    int fd = strcmp(rel, ".") == 0 ? sk_open(root, ".", O_PATH, 0) : sk_open_parent(root, rel, &name);
    if (fd < 0)
        return fd;
    int result = strcmp(rel, ".") == 0 ? fstat(fd, &st) : fstatat(fd, name, &st, AT_SYMLINK_NOFOLLOW);
    if (result == 0 && S_ISLNK(st.st_mode)) {
        target_len = readlinkat(fd, name, target, sizeof target);
        result = target_len < 0 ? -1 : 0;
    }
    int error = errno;
    close(fd);
    if (result < 0)
        return -error;
    return (int)sk_stat_record(reply, &st, rel, strlen(rel), target, (size_t)target_len);
}

static int rename_file(int root, const char *rel, const struct request *r)
{
    char rel2[PATH_MAX];
    const char *name, *name2;
    int root2, error = 0;
    int split = sk_path_split(&sk_roots, (const char *)r->path2, r->path2_len, &root2, rel2);
    if (split < 0)
        return split;
    int made = make_parents(root2, rel2);
    if (made < 0)
        return made;
    int from = sk_open_parent(root, rel, &name);
    if (from < 0)
        return from;
    int to = sk_open_parent(root2, rel2, &name2);
    if (to < 0) {
        close(from);
        return to;
    }
    if (renameat(from, name, to, name2) < 0)
        error = errno == EXDEV ? ENOTSUP : errno; /* two file systems: nothing of it leads outside */
    close(from);
    close(to);
    return -error;
}

static int remove_file(int root, const char *rel)
{
    const char *name;
    struct stat st;
    int error = 0, parent = sk_open_parent(root, rel, &name);
    if (parent < 0)
        return parent;
    if (fstatat(parent, name, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
        unlinkat(parent, name, S_ISDIR(st.st_mode) ? AT_REMOVEDIR : 0) < 0)
        error = errno;
    close(parent);
    return -error;
}

void sk_file_request(uint8_t type, uint32_t id, const uint8_t *payload, size_t len)
{
    struct request r;
    char rel[PATH_MAX];
    int root;
    if (!decode(payload, len, &r)) {
        sk_send_error(id, EBADMSG, "malformed request");
        return;
    }
    int result = sk_path_split(&sk_roots, (const char *)r.path, r.path_len, &root, rel);
    if (result == 0) {
        switch (type) {
        case SK_FILE_READ:
            result = read_file(root, rel, &r);
            break;
        case SK_FILE_WRITE:
            result = r.flags & SK_FLAG_PARENTS ? make_parents(root, rel) : 0;
            if (result == 0)
                result = r.handle != 0 ? collect(root, rel, &r) : write_file(root, rel, &r);
            break;
        case SK_FILE_STAT:
            result = stat_file(root, rel);
            break;
        case SK_FILE_MKDIR:
            result = sk_mkdirs(root, rel, 0755);
            break;
        case SK_FILE_RENAME:
            result = r.path2 == NULL ? -EBADMSG : rename_file(root, rel, &r);
            break;
        default:
            result = remove_file(root, rel);
        }
    }
    if (result < 0)
        sk_send_error(id, -result, strerror(-result));
    else
        sk_send(SK_RESULT, id, reply, type == SK_FILE_READ || type == SK_FILE_STAT ? (size_t)result : 0);
}

/* File operations that are short enough for the event loop: at most one open and one frame of data.
 *
 * Content that fits into one frame is written in place, after its room has been reserved. Files that are read or written
 * frame by frame are in handles.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "applets.h"
#include "files.h"

static uint8_t reply[SK_PAYLOAD_MAX];
_Static_assert(SK_STAT_RECORD_MAX <= SK_PAYLOAD_MAX, "a record fits into a reply");

static bool decode(const uint8_t *payload, size_t len, struct sk_request *r)
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

/* The request's length of it, or what a frame holds, into `reply`. */
static int read_at(int fd, const struct sk_request *r)
{
    size_t want = r->length < sizeof reply ? r->length : sizeof reply, have = 0;
    while (have < want) {
        ssize_t n = pread(fd, reply + have, want - have, (off_t)(r->offset + have));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        have += (size_t)n;
    }
    return (int)have;
}

/* With a handle, the file stays open until a frame is not filled. */
static int read_file(int root, const char *rel, const struct sk_request *r)
{
    bool first = r->handle == 0 || r->flags & SK_FLAG_KEEP;
    int fd = first ? sk_open_regular(root, rel, O_RDONLY, 0) : sk_handle_fd(r->handle);
    if (fd < 0)
        return fd;
    int result = read_at(fd, r);
    bool filled = result > 0 && ((uint32_t)result == r->length || (size_t)result == sizeof reply);
    if (first && r->handle != 0 && filled) {
        int kept = sk_handle_keep(r->handle, fd);
        return kept < 0 ? kept : result;
    }
    if (first)
        close(fd);
    else if (!filled)
        sk_handle_drop(r->handle);
    return result;
}

/* Room for `size` bytes of a file that has `old`. Where the size cannot be kept meanwhile (gVisor), it grows. */
static int reserve(int fd, off_t size, off_t old)
{
    if (fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, size) == 0)
        return 0;
    if (errno == EOPNOTSUPP && fallocate(fd, 0, 0, size) == 0)
        return 0;
    int error = errno;
    if (error == EOPNOTSUPP || error == EINTR)
        return 0;
    return ftruncate(fd, old) < 0 ? -errno : -error;
}

/* Replaces the content by that of one frame. Where there is no room for it, the old content stays. */
static int overwrite(int fd, const struct sk_request *r)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return -errno;
    if (st.st_size > 0 && r->data_len > (uint64_t)st.st_blocks * 512) {
        int reserved = reserve(fd, (off_t)r->data_len, st.st_size);
        if (reserved < 0)
            return reserved;
    }
    int result = sk_handle_write_at(fd, r);
    if (result == 0 && st.st_size > (off_t)r->data_len && ftruncate(fd, (off_t)r->data_len) < 0)
        result = -errno;
    return result;
}

int sk_open_in_place(int root, const char *rel)
{
    struct statvfs fs;
    int fd = sk_open_regular(root, rel, O_WRONLY | O_CREAT, 0644);
    /* Without O_TRUNC the kernel looks at the file's mode first, which is not what the caller can change. */
    return fd == -EACCES && fstatvfs(root, &fs) == 0 && fs.f_flag & ST_RDONLY ? -EROFS : fd;
}

static int write_file(int root, const char *rel, const struct sk_request *r)
{
    int fd = sk_open_in_place(root, rel);
    if (fd < 0)
        return fd;
    int result = r->flags & SK_FLAG_TRUNCATE ? overwrite(fd, r) : sk_handle_write_at(fd, r);
    if (close(fd) < 0 && result == 0)
        result = -errno;
    return result;
}

static int stat_file(int root, const char *rel, uint32_t handle)
{
    struct stat st;
    char target[PATH_MAX];
    ssize_t target_len = 0;
    const char *name;
    if (handle != 0) {
        int kept = sk_handle_fd(handle);
        if (kept < 0 || fstat(kept, &st) < 0)
            return kept < 0 ? kept : -errno;
        return (int)sk_stat_record(reply, &st, rel, strlen(rel), target, 0);
    }
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

static int rename_file(int root, const char *rel, const struct sk_request *r)
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
    struct sk_request r;
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
                result = r.handle != 0 ? sk_handle_write(root, rel, &r) : write_file(root, rel, &r);
            break;
        case SK_FILE_STAT:
            result = stat_file(root, rel, r.handle);
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

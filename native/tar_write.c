/*
 * The applet tar: streams a tree to stdout as a POSIX pax archive.
 *
 * A header states what a file's descriptor says, and exactly that many bytes follow: a file that shrinks
 * meanwhile is filled up with zeros, one that grows is cut. An extended header comes before an entry only
 * where the plain one cannot hold it: a name or link over 100 bytes or not ASCII, numbers beyond octal.
 * Names are the tree's own bytes; hdrcharset=BINARY marks those that are not UTF-8. Files with holes are
 * written in GNU's sparse format 1.0, so that holes take no room.
 *
 * Sockets, FIFOs and devices are left out with a remark; what cannot be read makes the archive partial. Both
 * are listed at the end: the directory comes once more, with a record "comment=SKERRY.skipped ERRNO PATH" for
 * each in its extended header. Other readers ignore comments. "comment=SKERRY.skipped.more COUNT" counts
 * those for which there was no room.
 */
#define _GNU_SOURCE
#include "applet_common.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "paths.h"
#include "tar_format.h"

/* ---- Hard links ---- */

#define LINK_SLOTS 32768     /* three quarters of them are used */
#define LINK_NAMES (4 << 20) /* bytes; once either is used up, further links become copies */

static struct link_slot {
    dev_t dev;
    ino_t ino;
    const char *path;
} *links;

/* The path under which this file was already written; or NULL, and remembers `path` for it. */
static const char *seen_before(const struct stat *st, const char *path)
{
    static char *names;
    static size_t names_len, count;
    if (links == NULL) {
        links = calloc(LINK_SLOTS, sizeof *links);
        names = malloc(LINK_NAMES);
        if (links == NULL || names == NULL)
            applet_fail(ENOMEM, path);
    }
    size_t slot = (size_t)(st->st_ino * 0x9e3779b97f4a7c15u >> 40) % LINK_SLOTS;
    for (; links[slot].path != NULL; slot = (slot + 1) % LINK_SLOTS)
        if (links[slot].ino == st->st_ino && links[slot].dev == st->st_dev)
            return links[slot].path;
    size_t size = strlen(path) + 1;
    if (count < LINK_SLOTS / 4 * 3 && size <= LINK_NAMES - names_len) {
        links[slot] = (struct link_slot){st->st_dev, st->st_ino, memcpy(names + names_len, path, size)};
        names_len += size;
        count++;
    }
    return NULL;
}

/* ---- Headers ---- */

static char pax[2 * SK_NAME_LIMIT + 1024]; /* a path, a link and some numbers */
static size_t pax_len;

static size_t record_size(const char *key, const char *value)
{
    /* The length of a record counts its own digits. */
    size_t rest = strlen(key) + strlen(value) + 3, len = rest + 1;
    while (len != rest + (size_t)snprintf(NULL, 0, "%zu", len))
        len = rest + (size_t)snprintf(NULL, 0, "%zu", len);
    return len;
}

static size_t put_record(char *out, size_t room, const char *key, const char *value)
{
    return (size_t)snprintf(out, room, "%zu %s=%s\n", record_size(key, value), key, value);
}

static void pax_add(const char *key, const char *value)
{
    pax_len += put_record(pax + pax_len, sizeof pax - pax_len, key, value);
}

static void pax_add_number(const char *key, int64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRId64, value);
    pax_add(key, text);
}

enum charset { ASCII, UTF8, BINARY };

static enum charset charset_of(const char *text)
{
    enum charset result = ASCII;
    for (const unsigned char *p = (const unsigned char *)text; *p != '\0'; p++) {
        if (*p < 0x80)
            continue;
        int more = *p >= 0xc2 && *p < 0xe0 ? 1 : (*p & 0xf0) == 0xe0 ? 2 : *p >= 0xf0 && *p < 0xf5 ? 3 : 0;
        bool wrong = more == 0 || (*p == 0xe0 && p[1] < 0xa0) || (*p == 0xed && p[1] >= 0xa0) ||
                     (*p == 0xf0 && p[1] < 0x90) || (*p == 0xf4 && p[1] >= 0x90);
        while (!wrong && more-- > 0)
            wrong = (*++p & 0xc0) != 0x80;
        if (wrong)
            return BINARY;
        result = UTF8;
    }
    return result;
}

/* Text goes into its field as far as it fits, and into the extended header if that is not enough. */
static void set_text(char *field, size_t size, const char *key, const char *text)
{
    size_t len = strlen(text);
    memcpy(field, text, len < size ? len : size);
    if (len > size || charset_of(text) != ASCII)
        pax_add(key, text);
}

static void set_number(char *field, size_t size, const char *key, int64_t value)
{
    char text[24];
    if (value < 0 || value >> (3 * (size - 1)) != 0) {
        pax_add_number(key, value);
        value = 0;
    }
    snprintf(text, sizeof text, "%0*" PRIo64, (int)size - 1, (uint64_t)value);
    memcpy(field, text, size);
}

static void put_header(struct tar_header *header)
{
    unsigned sum = 0;
    memcpy(header->magic, "ustar", 6);
    memcpy(header->version, "00", 2);
    memset(header->checksum, ' ', sizeof header->checksum);
    for (size_t i = 0; i < sizeof *header; i++)
        sum += ((const unsigned char *)header)[i];
    snprintf(header->checksum, sizeof header->checksum, "%06o", sum & 0777777);
    applet_put(header, sizeof *header);
}

static void put_padding(int64_t size)
{
    static const char zeros[TAR_BLOCK];
    applet_put(zeros, (size_t)(-size & (TAR_BLOCK - 1)));
}

/* What is left out: records of the last extended header. */
static char skipped[256 << 10];
#define SKIPPED_MAX (sizeof skipped - 96) /* the rest is for the count of those without room */
static size_t skipped_len;
static int64_t skipped_more;

static void put_extended(bool last)
{
    size_t more = last ? skipped_len : 0;
    struct tar_header extended = {.name = "././@PaxHeader", .mode = "0000644", .uid = "0000000",
                                  .gid = "0000000", .mtime = "00000000000", .type = 'x'};
    set_number(extended.size, sizeof extended.size, "", (int64_t)(pax_len + more));
    put_header(&extended);
    applet_put(pax, pax_len);
    applet_put(skipped, more);
    put_padding((int64_t)(pax_len + more));
}

/* `real_size` is that of a sparse file, else -1; `size` is what follows in the archive. */
static void put_entry(char type, const char *path, const char *link, const struct stat *st, int64_t size,
                      int64_t real_size, bool last)
{
    static char name[SK_NAME_LIMIT + 2];
    struct tar_header header = {.type = type};
    strcpy(stpcpy(name, path), type == '5' ? "/" : "");
    pax_len = 0;
    if (charset_of(name) == BINARY || charset_of(link) == BINARY)
        pax_add("hdrcharset", "BINARY");
    if (real_size >= 0) {
        /* A reader that does not know the format must not take the map for the file. */
        const char *slash = strrchr(name, '/');
        pax_add("GNU.sparse.major", "1");
        pax_add("GNU.sparse.minor", "0");
        pax_add("GNU.sparse.name", name);
        pax_add_number("GNU.sparse.realsize", real_size);
        snprintf(header.name, sizeof header.name, "GNUSparseFile.0/%.80s", slash != NULL ? slash + 1 : name);
    } else {
        set_text(header.name, sizeof header.name, "path", name);
    }
    set_text(header.link, sizeof header.link, "linkpath", link);
    set_number(header.mode, sizeof header.mode, "", st->st_mode & 07777);
    set_number(header.uid, sizeof header.uid, "uid", st->st_uid);
    set_number(header.gid, sizeof header.gid, "gid", st->st_gid);
    set_number(header.size, sizeof header.size, "size", size);
    set_number(header.mtime, sizeof header.mtime, "mtime", st->st_mtim.tv_sec);
    if (pax_len > 0 || last)
        put_extended(last);
    put_header(&header);
}

/* ---- What is left out ---- */

static int last_error;

static void note_skipped(int error, const char *path)
{
    static char value[SK_NAME_LIMIT + 64];
    last_error = error;
    snprintf(value, sizeof value, "SKERRY.skipped %d %s", error, path);
    if (record_size("comment", value) < SKIPPED_MAX - skipped_len)
        skipped_len += put_record(skipped + skipped_len, sizeof skipped - skipped_len, "comment", value);
    else
        skipped_more++;
}

static void put_skipped(const char *name, const struct stat *st)
{
    char value[64];
    if (skipped_len == 0)
        return;
    snprintf(value, sizeof value, "SKERRY.skipped.more %" PRId64, skipped_more);
    if (skipped_more > 0)
        skipped_len += put_record(skipped + skipped_len, sizeof skipped - skipped_len, "comment", value);
    put_entry('5', name, "", st, 0, -1, true);
}

/* ---- Holes ---- */

static struct tar_segment *segments;
static size_t segment_count;

static bool add_segment(int64_t offset, int64_t size)
{
    static size_t room;
    if (segment_count == TAR_SEGMENTS_MAX)
        return false;
    if (segment_count == room) {
        room = room > 0 ? 2 * room : 256;
        segments = realloc(segments, room * sizeof *segments);
        if (segments == NULL)
            applet_fail(ENOMEM, "the map of a sparse file");
    }
    segments[segment_count++] = (struct tar_segment){offset, size};
    return true;
}

/* Fills `segments`. Returns 0 if the file has holes, else an errno: EINVAL for none, EFBIG for too many. */
static int find_holes(int fd, const struct stat *st)
{
    int64_t data = 0, hole = 0;
    segment_count = 0;
    if (st->st_blocks >= (st->st_size + 511) / 512)
        return EINVAL;
    while (hole < st->st_size && (data = lseek(fd, hole, SEEK_DATA)) >= 0 && data < st->st_size) {
        if (data < hole || (hole = lseek(fd, data, SEEK_HOLE)) <= data)
            return EINVAL; /* a file system that does not know, or a file that changes under us */
        if (hole > st->st_size)
            hole = st->st_size;
        if (!add_segment(data, hole - data))
            return EFBIG;
    }
    if (hole < st->st_size && data < 0 && errno != ENXIO)
        return EINVAL;
    if (segment_count == 1 && segments[0].offset == 0 && segments[0].size == st->st_size)
        return EINVAL;
    /* GNU tar makes a hole at the end only if an empty piece follows it. */
    return hole == st->st_size || add_segment(st->st_size, 0) ? 0 : EFBIG;
}

/* Writes the map if `out`; gives its length without padding. */
static int64_t put_map(bool out)
{
    char line[64];
    int64_t length = 0;
    for (size_t i = 0; i <= segment_count; i++) {
        int n = i == 0 ? snprintf(line, sizeof line, "%zu\n", segment_count)
                       : snprintf(line, sizeof line, "%" PRId64 "\n%" PRId64 "\n", segments[i - 1].offset,
                                  segments[i - 1].size);
        length += n;
        if (out)
            applet_put(line, (size_t)n);
    }
    return length;
}

/* ---- Entries ---- */

/* Exactly `size` bytes, from `offset` on. */
static void put_data(int fd, int64_t offset, int64_t size, const char *path)
{
    static char data[65536];
    bool ended = false;
    for (int64_t left = size; left > 0;) {
        size_t want = left < (int64_t)sizeof data ? (size_t)left : sizeof data;
        ssize_t n = ended ? 0 : pread(fd, data, want, offset + size - left);
        if (n < 0)
            applet_complain(errno, path);
        if (n <= 0 && !ended) {
            ended = true;
            memset(data, 0, sizeof data);
        }
        size_t got = n > 0 ? (size_t)n : want;
        applet_put(data, got);
        left -= (int64_t)got;
    }
}

static void put_sparse(int fd, const struct stat *st, const char *path)
{
    int64_t map = put_map(false), size = map + (-map & (TAR_BLOCK - 1));
    for (size_t i = 0; i < segment_count; i++)
        size += segments[i].size;
    put_entry('0', path, "", st, size, st->st_size, false);
    put_map(true);
    put_padding(map);
    for (size_t i = 0; i < segment_count; i++)
        put_data(fd, segments[i].offset, segments[i].size, path);
    put_padding(size);
}

static void put_file(int dir_fd, const char *name, const char *path)
{
    struct stat st;
    int fd = openat(dir_fd, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        if (fd >= 0)
            close(fd); /* swapped for something else: as good as gone */
        else if (!walk_vanished(errno))
            applet_complain(errno, path);
        return;
    }
    const char *earlier = st.st_nlink > 1 ? seen_before(&st, path) : NULL;
    if (earlier != NULL) {
        put_entry('1', path, earlier, &st, 0, -1, false);
        close(fd);
        return;
    }
    int holes = find_holes(fd, &st);
    if (holes == 0) {
        put_sparse(fd, &st, path);
    } else if (holes == EFBIG) {
        applet_complain(EFBIG, path);
    } else {
        put_entry('0', path, "", &st, st.st_size, -1, false);
        put_data(fd, 0, st.st_size, path);
        put_padding(st.st_size);
    }
    close(fd);
}

/* Writes an entry; true if it is a directory. */
static bool put_any(int dir_fd, const char *name, const char *path)
{
    char target[PATH_MAX + 1];
    struct stat st;
    if (fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno != ENOENT)
            applet_complain(errno, path);
        return false;
    }
    if (S_ISREG(st.st_mode)) {
        put_file(dir_fd, name, path);
    } else if (S_ISLNK(st.st_mode)) {
        ssize_t n = readlinkat(dir_fd, name, target, PATH_MAX);
        if (n >= 0) {
            target[n] = '\0';
            put_entry('2', path, target, &st, 0, -1, false);
        }
    } else if (S_ISDIR(st.st_mode)) {
        put_entry('5', path, "", &st, 0, -1, false);
        return true;
    } else {
        applet_remark(ENOTSUP, path);
    }
    return false;
}

static void put_tree(int fd, const char *prefix)
{
    static struct walk w;
    walk_start(&w, fd, prefix);
    for (enum walk_event event; (event = walk_next(&w)) != WALK_DONE;) {
        if (event == WALK_LEFT)
            continue;
        int error = ENAMETOOLONG;
        if (w.fits)
            error = put_any(w.dir_fd, w.name, w.path) ? -walk_enter(&w, false) : 0;
        if (error != 0 && !walk_vanished(error))
            applet_complain(error, w.path);
    }
}

void applet_tar(const struct applet_target *target, bool contents)
{
    const char *name = target->root_name;
    struct stat st;
    int fd, dir;
    applet_on_remark = note_skipped;
    if (contents) {
        if ((fd = sk_open(target->root_fd, target->rel, O_RDONLY | O_DIRECTORY, 0)) < 0)
            applet_fail(-fd, target->rel);
        if (fstat(fd, &st) < 0)
            applet_fail(errno, target->rel);
        put_tree(fd, "");
    } else {
        /* A root is seen from inside, by the name of its own path. */
        bool root = strcmp(target->rel, ".") == 0;
        dir = root ? sk_open(target->root_fd, ".", O_PATH | O_DIRECTORY, 0)
                   : sk_open_parent(target->root_fd, target->rel, &name);
        const char *at = root ? "." : name;
        if (dir < 0 || fstatat(dir, at, &st, AT_SYMLINK_NOFOLLOW) < 0)
            applet_fail(dir < 0 ? -dir : errno, target->rel);
        if (put_any(dir, at, name)) {
            if ((fd = walk_open(dir, at, false)) < 0)
                applet_fail(-fd, target->rel);
            put_tree(fd, name);
        } else if (last_error != 0) {
            applet_fail(last_error == ENOTSUP ? ENXIO : last_error, target->rel); /* there is nothing else */
        }
    }
    put_skipped(contents ? "." : name, &st);
    static const char end[2 * TAR_BLOCK];
    applet_put(end, sizeof end);
}

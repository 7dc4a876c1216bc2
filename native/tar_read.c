/*
 * The applet untar: extracts an archive from stdin below a directory.
 *
 * Nothing in the archive is believed. Names lose their leading slashes and must not hold "..", and each
 * entry's parent is opened anew beneath the destination: links that the archive, or anybody else, put there
 * lead nowhere else. Files are made with O_EXCL after removing what was in their place, so nothing is
 * written through a link. An entry that cannot be made is a line on stderr and the rest goes on; an archive
 * that makes no sense ends at once, as does a full disk. Owners and setuid bits are not taken over.
 *
 * Directories are made with mode 0700 and get their own mode and time when all is done, from a list of
 * bounded size; when it is full they get them early, and what still changes in them changes their times.
 */
#define _GNU_SOURCE
#include "applet_common.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "paths.h"
#include "tar_format.h"

#define MAX_EXTENDED (1 << 20) /* bytes of one extended header */
#define LATER_SIZE (4 << 20)   /* bytes of the list of directories */
#define MAX_SWAPS 4            /* of something else into the place that we just cleared */

struct entry {
    char path[SK_NAME_LIMIT + 2], link[SK_NAME_LIMIT + 2];
    bool has_path, has_link, has_size, has_mtime; /* given by extended headers, for the next entry */
    bool sparse, has_sparse_name;                 /* GNU's sparse format 1.0: a map precedes the data */
    int64_t real_size;                            /* of a sparse file; -1: not given */
    char type;
    mode_t mode;
    int64_t size;
    struct timespec mtime;
};

/* ---- Input ---- */

static uint8_t input[65536];
static size_t input_at, input_end;

/* What is left of the last read, at least one byte; 0 at the end. */
static size_t available(void)
{
    while (input_at == input_end) {
        ssize_t n = read(STDIN_FILENO, input, sizeof input);
        if (n < 0 && errno != EINTR)
            applet_fail(errno, "standard input");
        if (n == 0)
            return 0;
        input_at = 0;
        input_end = n > 0 ? (size_t)n : 0;
    }
    return input_end - input_at;
}

/* Takes up to `want` bytes that are at hand; the archive must not end here. */
static const uint8_t *take_some(int64_t want, size_t *got)
{
    size_t n = available();
    if (n == 0)
        applet_bad("the archive ends too early");
    *got = (int64_t)n < want ? n : (size_t)want;
    input_at += *got;
    return input + input_at - *got;
}

static void take(void *out, int64_t want)
{
    size_t n;
    for (uint8_t *to = out; want > 0; to += n, want -= (int64_t)n) {
        const uint8_t *from = take_some(want, &n);
        memcpy(to, from, n);
    }
}

static void skip(int64_t size)
{
    for (size_t n; size > 0; size -= (int64_t)n)
        take_some(size, &n);
}

static int64_t padding(int64_t size)
{
    return (int64_t)(-(uint64_t)size % TAR_BLOCK);
}

/* ---- Headers ---- */

/* Octal digits among spaces, or, with the top bit set, a big-endian number in two's complement. */
static int64_t number(const char *field, size_t size)
{
    const unsigned char *p = (const unsigned char *)field, *end = p + size;
    if (*p & 0x80) {
        int64_t value = *p & 0x40 ? -1 : 0;
        for (value = value * 64 + (*p++ & 0x3f); p < end; p++) {
            if (value > INT64_MAX >> 8 || value < INT64_MIN >> 8)
                applet_bad("a number in a header is too large");
            value = value * 256 + *p;
        }
        return value;
    }
    int64_t value = 0;
    while (p < end && *p == ' ')
        p++;
    for (; p < end && *p >= '0' && *p <= '7'; p++)
        value = value * 8 + (*p - '0'); /* at most 12 digits */
    if (p < end && *p != ' ' && *p != '\0')
        applet_bad("a number in a header is not one");
    return value;
}

static bool checksum_matches(const struct tar_header *header)
{
    struct tar_header blank = *header;
    int64_t unsigned_sum = 0, signed_sum = 0; /* some old archivers added up signed characters */
    memset(blank.checksum, ' ', sizeof blank.checksum);
    for (size_t i = 0; i < sizeof blank; i++) {
        unsigned_sum += ((const unsigned char *)&blank)[i];
        signed_sum += ((const signed char *)&blank)[i];
    }
    int64_t stated = number(header->checksum, sizeof header->checksum);
    return stated == unsigned_sum || stated == signed_sum;
}

/* Copies a field, which fills its size or ends with a NUL, as a string; gives its end. */
static char *field_text(char *out, const char *field, size_t size)
{
    size_t len = strnlen(field, size);
    memcpy(out, field, len);
    out[len] = '\0';
    return out + len;
}

static void set_text(char out[SK_NAME_LIMIT + 2], bool *has, const char *text, size_t len)
{
    if (len > SK_NAME_LIMIT + 1)
        applet_bad("a name is too long");
    memcpy(out, text, len);
    out[len] = '\0';
    *has = len > 0;
}

/* "[-]digits[.digits]", as in extended headers; the number as a whole must fit 64 bits. */
static struct timespec decimal(const char *text, size_t len)
{
    struct timespec result = {0};
    const char *p = text, *end = text + len;
    bool negative = p < end && *p == '-';
    p += negative;
    for (; p < end && *p >= '0' && *p <= '9'; p++)
        if (__builtin_mul_overflow(result.tv_sec, 10, &result.tv_sec) ||
            __builtin_add_overflow(result.tv_sec, *p - '0', &result.tv_sec))
            applet_bad("a number in an extended header is too large");
    if (p < end && *p == '.')
        for (long unit = 100000000; ++p < end && *p >= '0' && *p <= '9'; unit /= 10)
            result.tv_nsec += unit * (*p - '0');
    if (p != end || len == 0)
        applet_bad("a number in an extended header is not one");
    if (negative) {
        result.tv_sec = -result.tv_sec - (result.tv_nsec > 0);
        result.tv_nsec = result.tv_nsec > 0 ? 1000000000 - result.tv_nsec : 0;
    }
    return result;
}

static bool is(const char *key, size_t len, const char *word)
{
    return len == strlen(word) && memcmp(key, word, len) == 0;
}

static const char *const OTHER_SPARSE =
    "sparse files in this format are not supported: archive with --format=posix, or without --sparse";

/* GNU.sparse.*, of which format 1.0 has these. */
static void read_sparse(struct entry *e, const char *key, size_t key_len, const char *value, size_t len)
{
    if (is(key, key_len, "name")) {
        if (memchr(value, '\0', len) != NULL)
            applet_bad("a name has a NUL in it");
        set_text(e->path, &e->has_path, value, len);
        e->has_sparse_name = e->has_path;
    } else if (is(key, key_len, "realsize")) {
        if ((e->real_size = decimal(value, len).tv_sec) < 0)
            applet_bad("a size is negative");
    } else if (is(key, key_len, "major") && is(value, len, "1")) {
        e->sparse = true;
    } else if (!is(key, key_len, "minor") || !is(value, len, "0")) {
        applet_bad(OTHER_SPARSE);
    }
}

/* Records "LENGTH KEY=VALUE\n", each LENGTH counting the whole record. */
static void read_extended(struct entry *e, const char *text, size_t len)
{
    for (size_t size; len > 0; text += size, len -= size) {
        size_t at = 0;
        for (size = 0; at < len && at < 8 && text[at] >= '0' && text[at] <= '9'; at++)
            size = size * 10 + (size_t)(text[at] - '0');
        if (at == 0 || at >= len || text[at] != ' ' || size > len || size <= ++at || text[size - 1] != '\n')
            applet_bad("an extended header is malformed");
        const char *key = text + at, *end = text + size - 1;
        const char *equals = memchr(key, '=', (size_t)(end - key));
        if (equals == NULL)
            applet_bad("an extended header is malformed");
        size_t key_len = (size_t)(equals - key), value_len = (size_t)(end - equals) - 1;
        const char *value = equals + 1;
        bool is_path = is(key, key_len, "path"), is_link = is(key, key_len, "linkpath");
        if ((is_path || is_link) && memchr(value, '\0', value_len) != NULL)
            applet_bad("a name has a NUL in it");
        if (is_path) {
            if (!e->has_sparse_name)
                set_text(e->path, &e->has_path, value, value_len);
        } else if (is_link) {
            set_text(e->link, &e->has_link, value, value_len);
        } else if (is(key, key_len, "size")) {
            if ((e->size = decimal(value, value_len).tv_sec) < 0)
                applet_bad("a size is negative");
            e->has_size = true;
        } else if (is(key, key_len, "mtime")) {
            e->mtime = decimal(value, value_len);
            e->has_mtime = true;
        } else if (key_len > 11 && memcmp(key, "GNU.sparse.", 11) == 0) {
            read_sparse(e, key + 11, key_len - 11, value, value_len);
        }
    }
}

/* Reads the data of an entry that is about the next entry. */
static void read_meta(struct entry *e, char type, int64_t size)
{
    if (size > MAX_EXTENDED)
        applet_bad("an extended header is too large");
    char *text = malloc((size_t)size + 1);
    if (text == NULL)
        applet_fail(ENOMEM, "an extended header");
    take(text, size);
    text[size] = '\0';
    if (type == 'x')
        read_extended(e, text, (size_t)size);
    else if (type == 'L' && !e->has_path)
        set_text(e->path, &e->has_path, text, strlen(text));
    else if (type == 'K' && !e->has_link)
        set_text(e->link, &e->has_link, text, strlen(text));
    free(text);
    skip(padding(size));
}

/* Reads headers up to and with that of the next entry; false at the end of the archive. */
static bool next_entry(struct entry *e)
{
    static const struct tar_header zeros;
    struct tar_header header;
    e->has_path = e->has_link = e->has_size = e->has_mtime = e->sparse = e->has_sparse_name = false;
    e->real_size = -1;
    for (;;) {
        take(&header, sizeof header);
        if (memcmp(&header, &zeros, sizeof header) == 0)
            return false;
        if (!checksum_matches(&header))
            applet_bad("a header's checksum is wrong: not a tar archive, or a damaged one");
        int64_t size = number(header.size, sizeof header.size);
        if (size < 0)
            applet_bad("a size is negative");
        if (memchr("xgLK", header.type != '\0' ? header.type : '0', 4) == NULL) {
            if (!e->has_size)
                e->size = size;
            break;
        }
        read_meta(e, header.type, size);
    }
    if (!e->has_path) {
        char *to = e->path;
        if (memcmp(header.magic, "ustar", 6) == 0 && header.prefix[0] != '\0')
            to = stpcpy(field_text(to, header.prefix, sizeof header.prefix), "/");
        field_text(to, header.name, sizeof header.name);
    }
    if (!e->has_link)
        field_text(e->link, header.link, sizeof header.link);
    if (!e->has_mtime)
        e->mtime = (struct timespec){.tv_sec = number(header.mtime, sizeof header.mtime)};
    e->mode = (mode_t)(number(header.mode, sizeof header.mode) & 01777);
    e->type = header.type;
    size_t len = strlen(e->path);
    if (e->type == '\0' || e->type == '7')
        e->type = e->type == '\0' && len > 0 && e->path[len - 1] == '/' ? '5' : '0';
    if (e->type >= '1' && e->type <= '6')
        e->size = 0;
    if (e->type == 'S' || (e->real_size >= 0) != e->sparse || (e->sparse && e->type != '0'))
        applet_bad(OTHER_SPARSE);
    return true;
}

/* Normalises an archive's name in place: no leading slash, "." or empty component; false if it has "..". */
static bool clean(char *path)
{
    char *to = path;
    for (const char *from = path; *from != '\0';) {
        size_t len = strcspn(from, "/");
        const char *next = from + len + strspn(from + len, "/");
        if (is(from, len, ".."))
            return false;
        if (len > 0 && !is(from, len, ".")) {
            if (to != path)
                *to++ = '/';
            memmove(to, from, len);
            to += len;
        }
        from = next;
    }
    strcpy(to, to == path ? "." : "");
    return true;
}

/* ---- Extraction ---- */

static int destination;

/* An entry's error; one that all others would meet too ends the applet. */
static void entry_error(int error, const char *path)
{
    if (error == ENOSPC || error == EDQUOT || error == EROFS || error == EIO)
        applet_fail(error, path);
    applet_complain(error, path);
}

static int open_place(char *path, const char **name)
{
    char *slash = strrchr(path, '/');
    int dir = sk_open_parent(destination, path, name);
    if (dir == -ENOENT && slash != NULL) {
        *slash = '\0';
        int error = sk_mkdirs(destination, path, 0755);
        *slash = '/';
        dir = error < 0 ? error : sk_open_parent(destination, path, name);
    }
    return dir;
}

/* After EEXIST: removes what is there. False, with errno, if it cannot be, or comes back all the time. */
static bool make_room(int dir, const char *name, int *tries)
{
    if (errno != EEXIST || --*tries == 0)
        return false;
    return unlinkat(dir, name, 0) == 0 || errno == ENOENT;
}

/* A line of the map of a sparse file: a decimal number. `left` is what the entry still holds. */
static int64_t map_number(int64_t *left)
{
    int64_t value = 0;
    char c = '\0';
    for (int digits = 0;; digits++) {
        if (--*left < 0)
            applet_bad("the map of a sparse file is longer than its entry");
        take(&c, 1);
        if (c == '\n' && digits > 0)
            return value;
        if (c < '0' || c > '9' || __builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, c - '0', &value))
            applet_bad("the map of a sparse file is malformed");
    }
}

/* Takes the map, with its padding; the data must fill the rest of the entry exactly. */
static struct tar_segment *take_map(const struct entry *e, size_t *count)
{
    int64_t left = e->size, wanted = map_number(&left), end = 0, data = 0;
    if (wanted > TAR_SEGMENTS_MAX)
        applet_bad("a sparse file has too many pieces");
    struct tar_segment *map = malloc(((size_t)wanted + 1) * sizeof *map);
    if (map == NULL)
        applet_fail(ENOMEM, "the map of a sparse file");
    for (*count = 0; *count < (size_t)wanted; ++*count) {
        struct tar_segment piece = {.offset = map_number(&left)};
        piece.size = map_number(&left);
        if (piece.offset < end || __builtin_add_overflow(piece.offset, piece.size, &end) ||
            end > e->real_size)
            applet_bad("the map of a sparse file does not fit the file");
        data += piece.size;
        map[*count] = piece;
    }
    int64_t pad = padding(e->size - left);
    if (left - pad != data)
        applet_bad("the map of a sparse file does not fit its entry");
    skip(pad);
    return map;
}

/* Takes `size` bytes and writes them at the file's position, unless *error is set already. */
static void take_data(const struct entry *e, int fd, int64_t size, int *error)
{
    size_t n;
    for (int64_t left = size; left > 0; left -= (int64_t)n) {
        const uint8_t *data = take_some(left, &n);
        for (size_t done = 0; *error == 0 && done < n;) {
            ssize_t written = write(fd, data + done, n - done);
            if (written < 0 && errno != EINTR)
                entry_error(*error = errno, e->path);
            done += written > 0 ? (size_t)written : 0;
        }
    }
}

static void take_sparse(const struct entry *e, int fd, int *error)
{
    size_t count;
    struct tar_segment *map = take_map(e, &count);
    if (ftruncate(fd, e->real_size) < 0)
        entry_error(*error = errno, e->path);
    for (size_t i = 0; i < count; i++) {
        if (*error == 0 && lseek(fd, map[i].offset, SEEK_SET) < 0)
            entry_error(*error = errno, e->path);
        take_data(e, fd, map[i].size, error);
    }
    free(map);
}

static void extract_file(const struct entry *e, int dir, const char *name)
{
    int fd, error = 0, tries = MAX_SWAPS;
    while ((fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600)) < 0 &&
           make_room(dir, name, &tries))
        ;
    if (fd < 0) {
        entry_error(errno, e->path);
        skip(e->size);
        return;
    }
    if (e->sparse)
        take_sparse(e, fd, &error);
    else
        take_data(e, fd, e->size, &error);
    if (error == 0 && (fchmod(fd, e->mode) < 0 ||
                       futimens(fd, (struct timespec[]){{.tv_nsec = UTIME_OMIT}, e->mtime}) < 0))
        entry_error(errno, e->path);
    close(fd);
}

static void extract_symlink(const struct entry *e, int dir, const char *name)
{
    int result, tries = MAX_SWAPS;
    while ((result = symlinkat(e->link, dir, name)) < 0 && make_room(dir, name, &tries))
        ;
    if (result < 0)
        entry_error(errno, e->path);
    else
        utimensat(dir, name, (struct timespec[]){{.tv_nsec = UTIME_OMIT}, e->mtime}, AT_SYMLINK_NOFOLLOW);
}

static void extract_link(struct entry *e, int dir, const char *name)
{
    struct stat old, new;
    const char *from_name;
    int result, tries = MAX_SWAPS;
    int from = clean(e->link) ? sk_open_parent(destination, e->link, &from_name) : -EXDEV;
    if (from < 0) {
        entry_error(-from, e->path);
        return;
    }
    while ((result = linkat(from, from_name, dir, name, 0)) < 0) {
        int error = errno;
        if (error == EEXIST && fstatat(from, from_name, &old, AT_SYMLINK_NOFOLLOW) == 0 &&
            fstatat(dir, name, &new, AT_SYMLINK_NOFOLLOW) == 0 && old.st_ino == new.st_ino &&
            old.st_dev == new.st_dev)
            break; /* the same file already: removing it would lose it */
        errno = error;
        if (!make_room(dir, name, &tries)) {
            entry_error(errno, e->path);
            break;
        }
    }
    close(from);
}

struct later {
    struct timespec mtime;
    mode_t mode;
    uint32_t previous; /* where the one before begins */
    char path[];
};
static char *later;
static uint32_t later_len, later_last;

/* Gives directories their modes and times, the last first: a parent's mode may lock out what is in it. */
static void finish_directories(void)
{
    while (later_len > 0) {
        const struct later *l = (const struct later *)(const void *)(later + later_last);
        int fd = sk_open(destination, l->path, O_RDONLY | O_DIRECTORY, 0);
        if (fd < 0 || futimens(fd, (struct timespec[]){{.tv_nsec = UTIME_OMIT}, l->mtime}) < 0 ||
            fchmod(fd, l->mode) < 0)
            applet_complain(fd < 0 ? -fd : errno, l->path);
        if (fd >= 0)
            close(fd);
        later_len = later_last;
        later_last = l->previous;
    }
}

static void extract_directory(const struct entry *e, int dir, const char *name)
{
    if (mkdirat(dir, name, 0700) < 0) {
        int error = errno, fd = sk_open(destination, e->path, O_PATH | O_DIRECTORY, 0);
        if (error != EEXIST || fd < 0) {
            entry_error(error != EEXIST ? error : -fd, e->path);
            return;
        }
        close(fd);
    }
    size_t size = sizeof(struct later) + strlen(e->path) + 1;
    size = (size + _Alignof(struct later) - 1) / _Alignof(struct later) * _Alignof(struct later);
    if (size > LATER_SIZE - later_len)
        finish_directories();
    struct later *l = (struct later *)(void *)(later + later_len);
    *l = (struct later){.mtime = e->mtime, .mode = e->mode, .previous = later_last};
    strcpy(l->path, e->path);
    later_last = later_len;
    later_len += (uint32_t)size;
}

static void extract(struct entry *e)
{
    const char *name = "";
    int dir = -EXDEV;
    if (clean(e->path)) {
        if (e->type == '5' && strcmp(e->path, ".") == 0)
            return; /* the destination is its owner's, not the archive's */
        dir = strchr("0125", e->type) != NULL ? open_place(e->path, &name) : -ENOTSUP;
    }
    if (dir < 0) {
        entry_error(-dir, e->path);
        skip(e->size);
        return;
    }
    if (e->type == '1')
        extract_link(e, dir, name);
    else if (e->type == '2')
        extract_symlink(e, dir, name);
    else if (e->type == '5')
        extract_directory(e, dir, name);
    else
        extract_file(e, dir, name);
    close(dir);
}

void applet_untar(const struct applet_target *target, bool unused)
{
    static struct entry e;
    (void)unused;
    int error = sk_mkdirs(target->root_fd, target->rel, 0755);
    destination = error < 0 ? error : sk_open(target->root_fd, target->rel, O_PATH | O_DIRECTORY, 0);
    if (destination < 0)
        applet_fail(-destination, target->rel);
    if ((later = malloc(LATER_SIZE)) == NULL)
        applet_fail(ENOMEM, target->rel);
    while (next_entry(&e)) {
        extract(&e);
        skip(padding(e.size));
    }
    finish_directories();
    for (size_t n; available() > 0;) /* what follows is padding; its writer should not be cut off */
        take_some(INT64_MAX, &n);
}

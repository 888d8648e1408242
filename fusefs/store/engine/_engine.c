/* HTTP requests by libcurl in worker threads, which never hold the interpreter lock.
 *
 * Python gives each request to a worker (`submit`). The worker runs it in a curl multi handle of
 * its own, with its own connections, writes the answer's body to the request's sink, and adds the
 * transfer to the engine's list of completed ones. An eventfd tells the event loop that there are
 * transfers to `collect`. engine.py is the Python side.
 *
 * Threads: a transfer belongs to Python until it is queued, then to its worker, and to Python
 * again once it is on the completed list. Each worker's mutex guards its queue; the engine's mutex
 * guards the lists of transfers to collect. Both are held for a few instructions, never one inside
 * the other, and no Python code runs meanwhile. Workers touch no Python object; the engine holds a
 * reference to each transfer from `submit` to `collect`.
 *
 * libcurl (https://curl.se/libcurl/c/threadsafe.html): a multi handle and its easy handles may be
 * used by one thread only. Other threads may call only curl_multi_wakeup. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <structmember.h>

#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "crc.h"

#if LIBCURL_VERSION_NUM < 0x075700 /* CURLOPT_QUICK_EXIT */
#error "fusefs needs libcurl 7.87 or newer"
#endif

enum {
    MOST_HEAD = 64 << 10,    /* headers of an answer and of the 1xx answers before it */
    MOST_INTERIM = 10,       /* answers with status 1xx before the answer */
    MOST_DOCUMENT = 1 << 20, /* the body of an answer that is not 2xx */
    LARGE = 512 << 10,       /* larger bodies go to the workers for large bodies */
    /* TLS delivers records of 16 KiB; larger writes make larger folios. */
    GATHERED = 256 << 10,
    FIRST = 64 << 10, /* the beginning is written and reported at this size */
    RECEIVED_AT_ONCE = 256 << 10,
    SMALL_AT_ONCE = 64 << 10, /* for small bodies: many are under way at a time */
    SENT_AT_ONCE = 256 << 10,
    SUM_BLOCK = 1 << 20, /* as BLOCK in cache/integrity/checksums.py */
    MOST_IDLE_S = 30,    /* older idle connections are not reused: they may be lost */
    CA_CACHED_S = 300,   /* parsed authorities are cached: their file may be replaced */
};
#define LONGEST_WAIT_S 60.0
#define STALLED_S 0.1 /* longer disk waits of a worker extend the servers' deadlines */

/* The CRC32 of the bytes [start, stop) of a file; engine.py unpacks it. */
struct sum {
    uint64_t start, stop, crc;
};

enum phase { CONNECTING, SENDING, AWAITING, RECEIVING };

struct transfer {
    PyObject_HEAD
    struct transfer *next, *previous;
    struct worker *worker; /* NULL before `submit` */
    CURL *easy;
    atomic_int is_cancelled;

    /* The request. */
    PyObject *request; /* owns the strings */
    const char *method, *url, *header_lines, *proxy, *ca_file, *etag, *path;
    struct curl_slist *headers;
    Py_buffer body;
    int is_head, has_body, body_fd, is_fresh;
    int64_t body_offset, body_length, body_sent;
    double connect_s, silence_s, least_rate, window_s, total_s;
    /* The sink: a file, a file created at `path` when all of its bytes are there, or memory. */
    int sink_fd, with_sums;
    int64_t sink_offset, start, length, size, limit, progress;

    /* The answer. */
    enum phase phase;
    double submitted, connected, first_byte, last_byte; /* monotonic seconds, 0: not yet */
    double last_moved, window_began;
    int64_t window_moved; /* bytes in either direction */
    int attempts, heads, head_size, is_checked, is_enough, has_news;
    int status;          /* set with the headers; Python may read it at any time */
    char *content;       /* for a sink in memory, or gathered for a file */
    size_t content_size, content_room;
    int64_t received;    /* bytes in the sink */
    struct sum *sums;    /* with room for the whole sink */
    size_t sum_count;
    char *head; /* "name\0value\0..." */
    size_t head_length;
    /* The outcome; if `error` is NULL, `code` may still be an error. */
    const char *error;
    CURLcode code;
    int error_number, may_have_been_executed;
    long proxy_status;
    char detail[CURL_ERROR_SIZE];

    /* Guarded by the engine's mutex: progress to report to Python, and reported. */
    int64_t shown;
    size_t sums_shown, sums_taken;
    int is_listed;
    struct transfer *next_listed;
};

struct worker {
    struct engine *engine;
    pthread_t thread;
    CURLM *multi;
    CURLSH *share;
    struct transfer active;     /* a ring */
    struct transfer *completed; /* not published yet */
    double next_check;          /* time to check deadlines */
    double on_disk_s;           /* time on the local disk in this round */
    atomic_int load;            /* transfers that are queued or active */

    pthread_mutex_t mutex;
    struct transfer *queue, **queue_end;
    int is_asleep, is_stopping, has_cancelled;
};

typedef struct engine {
    PyObject_HEAD
    PyTypeObject *transfer_type;
    int eventfd, small_count, worker_count;
    struct worker *workers;
    pthread_mutex_t mutex;
    struct transfer *completed, *listed;
} Engine;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* ---------------------------------------------------------------- the lists to collect */

/* Lists a transfer's progress for Python. The engine's mutex must be held. */
static void list_progress(Engine *engine, struct transfer *t) {
    t->shown = t->received;
    /* The last sum may still grow, unless the transfer has ended. */
    int grows = t->easy && t->sum_count && t->sums[t->sum_count - 1].stop % SUM_BLOCK;
    t->sums_shown = t->sum_count - (size_t)grows;
    if (!t->is_listed) {
        t->is_listed = 1;
        t->next_listed = engine->listed;
        engine->listed = t;
    }
}

/* Adds transfers to the engine's lists. The eventfd is written only if both were empty: until
 * Python collects them, further transfers need no wake-up. */
static void publish(Engine *engine, struct transfer *completed, struct transfer *progressed) {
    pthread_mutex_lock(&engine->mutex);
    int was_empty = engine->completed == NULL && engine->listed == NULL;
    for (struct transfer *t = completed, *after; t != NULL; t = after) {
        after = t->next;
        if (t->has_news)
            list_progress(engine, t);
        t->next = engine->completed;
        engine->completed = t;
    }
    if (progressed != NULL)
        list_progress(engine, progressed);
    pthread_mutex_unlock(&engine->mutex);
    if (was_empty)
        eventfd_write(engine->eventfd, 1);
}

/* ---------------------------------------------------------------- the sink */

static int reserve(struct transfer *t, size_t room) {
    if (room <= t->content_room)
        return 1;
    char *content = realloc(t->content, room);
    if (content == NULL) {
        t->error = "memory";
        return 0;
    }
    t->content = content;
    t->content_room = room;
    return 1;
}

static void add_sums(struct transfer *t, uint64_t at, const char *data, size_t size) {
    while (size) {
        if (!t->sum_count || t->sums[t->sum_count - 1].stop % SUM_BLOCK == 0)
            t->sums[t->sum_count++] = (struct sum){at, at, 0};
        struct sum *sum = &t->sums[t->sum_count - 1];
        size_t count = SUM_BLOCK - at % SUM_BLOCK;
        count = count < size ? count : size;
        sum->crc = crc32_of((uint32_t)sum->crc, data, count);
        sum->stop = at += count;
        data += count;
        size -= count;
    }
}

static int fail_sink(struct transfer *t, int number) {
    t->error_number = number;
    t->error = number == ENOSPC || number == EDQUOT ? "sink-full" : "sink-failed";
    return 0;
}

/* Creates the sink's file, and its folder if it is missing. */
static int create(struct transfer *t) {
    int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
    t->sink_fd = open(t->path, flags, 0600);
    if (t->sink_fd < 0 && errno == ENOENT) {
        char *folder = strdup(t->path), *name = folder ? strrchr(folder, '/') : NULL;
        if (name != NULL)
            *name = 0;
        int is_made = name != NULL && (mkdir(folder, 0777) == 0 || errno == EEXIST);
        free(folder);
        t->sink_fd = is_made ? open(t->path, flags, 0600) : -1;
    }
    return t->sink_fd >= 0 || fail_sink(t, errno);
}

/* Writes the gathered bytes. Bytes that a failed write left in the file are not counted. */
static int flush(struct transfer *t) {
    double began = now_s();
    const char *data = t->content;
    size_t left = t->content_size;
    t->content_size = 0;
    if (t->sink_fd < 0 && ((int64_t)left < t->length || !create(t)))
        return t->error == NULL;
    while (left) {
        int64_t at = t->sink_offset + t->received;
        ssize_t count = pwrite(t->sink_fd, data, left, at);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return fail_sink(t, count ? errno : EIO);
        if (t->with_sums)
            add_sums(t, (uint64_t)at, data, (size_t)count);
        t->received += count;
        data += count;
        left -= (size_t)count;
    }
    t->worker->on_disk_s += now_s() - began;
    if (t->progress && (!t->shown || t->received - t->shown >= t->progress))
        publish(t->worker->engine, NULL, t);
    return 1;
}

static int has_file(const struct transfer *t) {
    return t->sink_fd >= 0 || t->path != NULL;
}

static int is_for_file(const struct transfer *t) {
    return has_file(t) && !t->is_head && t->status >= 200 && t->status < 300;
}

static const char *header(const struct transfer *t, const char *name) {
    struct curl_header *found; /* of the last answer, neither 1xx nor a proxy's */
    return curl_easy_header(t->easy, name, 0, CURLH_HEADER, -1, &found) ? NULL : found->value;
}

/* Compares ETags without quotes, which some servers leave out, and without the mark of a weak
 * ETag, which some proxies add. */
static int has_etag(const struct transfer *t) {
    const char *found = header(t, "etag");
    size_t size = strlen(t->etag);
    if (found == NULL)
        return 0;
    found += strncmp(found, "W/", 2) == 0 ? 2 : 0;
    found += *found == '"';
    return strncmp(found, t->etag, size) == 0 && (!found[size] || !strcmp(found + size, "\""));
}

/* Returns the error if the headers show that the answer is not for the sink, or NULL. */
static const char *refusal(const struct transfer *t) {
    curl_off_t length = -1; /* -1: unknown */
    long long first = -1, last = -1, size = -1;
    curl_easy_getinfo(t->easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
    if (t->status < 200 || t->status >= 300 || t->is_head)
        return NULL;
    if (!has_file(t))
        return length > t->limit ? "too-large" : NULL;
    if (t->status != 200 && t->status != 206)
        return "protocol";
    if (t->etag && !has_etag(t))
        return "etag";
    if (t->status == 200) {
        if (t->start != 0)
            return "range";
        size = length;
    } else { /* RFC 9110, section 14.4; the size may be an asterisk. A shorter range is "short". */
        const char *range = header(t, "content-range");
        if (range == NULL || sscanf(range, "bytes %lld-%lld/%lld", &first, &last, &size) < 2 ||
            first != t->start || last < first || last - first >= t->length ||
            length > last - first + 1)
            return "range";
    }
    return t->size >= 0 && size >= 0 && size != t->size ? "size" : NULL;
}

static int to_file(struct transfer *t, const char *data, size_t size) {
    int64_t left = t->length - t->received - (int64_t)t->content_size;
    if ((int64_t)size > left) {
        size = (size_t)left;
        /* A server may send the whole object instead of its first bytes: ignore the rest. */
        if (t->status == 200 && (t->size < 0 || t->size > t->length))
            t->is_enough = 1;
        else
            t->error = t->status == 200 ? "size" : "range";
    }
    if (!reserve(t, t->length < GATHERED ? (size_t)t->length : GATHERED))
        return 0;
    while (size) {
        int is_first = t->progress && !t->path && !t->received && t->content_room > FIRST;
        size_t full = is_first ? FIRST : t->content_room;
        size_t count = full - t->content_size;
        count = count < size ? count : size;
        memcpy(t->content + t->content_size, data, count);
        t->content_size += count;
        data += count;
        size -= count;
        if (t->content_size == full && !flush(t))
            return 0;
    }
    return !t->is_enough && t->error == NULL;
}

static int to_memory(struct transfer *t, const char *data, size_t size) {
    int is_refusal = t->status < 200 || t->status >= 300;
    size_t needed = t->content_size + size;
    if ((int64_t)needed > (is_refusal ? MOST_DOCUMENT : t->limit)) {
        t->error = is_refusal ? NULL : "too-large";
        t->is_enough = is_refusal; /* the status is enough */
        t->content_size = 0;
        return 0;
    }
    if (needed > t->content_room && !reserve(t, needed + needed / 2 + 64))
        return 0;
    memcpy(t->content + t->content_size, data, size);
    t->content_size = needed;
    return 1;
}

/* ---------------------------------------------------------------- libcurl's callbacks */

static void note_moved(struct transfer *t, size_t size) {
    t->last_moved = now_s();
    t->window_moved += (int64_t)size;
}

static void begin_phase(struct transfer *t, enum phase phase) {
    t->phase = phase;
    t->last_moved = t->window_began = now_s();
    t->window_moved = 0;
}

static size_t on_body(char *data, size_t one, size_t size, void *argument) {
    struct transfer *t = argument;
    (void)one; /* always 1 */
    note_moved(t, size);
    if (!t->is_checked && (t->error = refusal(t)) != NULL)
        return CURL_WRITEFUNC_ERROR;
    t->is_checked = 1;
    int is_taken = is_for_file(t) ? to_file(t, data, size) : to_memory(t, data, size);
    return is_taken ? size : CURL_WRITEFUNC_ERROR;
}

/* Called for each line: status lines, headers, the empty line, and trailers after the body. */
static size_t on_header(char *line, size_t one, size_t size, void *argument) {
    struct transfer *t = argument;
    long status = 0;
    (void)one;
    note_moved(t, size);
    t->head_size += (int)size; /* a line has at most 100 KiB */
    t->heads += size > 5 && strncmp(line, "HTTP/", 5) == 0;
    if (t->head_size > MOST_HEAD || t->heads > MOST_INTERIM + 1) {
        t->error = "malformed";
        snprintf(t->detail, sizeof t->detail, "too many headers");
        return CURL_WRITEFUNC_ERROR;
    }
    if (!t->status && (*line == '\r' || *line == '\n')) {
        curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
        if (status >= 200) {
            begin_phase(t, RECEIVING);
            t->first_byte = t->last_moved;
            t->status = (int)status;
        }
    }
    return size;
}

static size_t on_read(char *to, size_t one, size_t room, void *argument) {
    struct transfer *t = argument;
    double began = now_s();
    int64_t left = t->body_length - t->body_sent;
    ssize_t count = (int64_t)room < left ? (ssize_t)room : (ssize_t)left;
    (void)one;
    if (t->body_fd < 0) {
        memcpy(to, (char *)t->body.buf + t->body_sent, (size_t)count);
    } else if (count) {
        do
            count = pread(t->body_fd, to, (size_t)count, t->body_offset + t->body_sent);
        while (count < 0 && errno == EINTR);
        if (count <= 0) { /* 0: the file became shorter */
            t->error_number = count ? errno : 0;
            t->error = "source-failed";
            return CURL_READFUNC_ABORT;
        }
    }
    note_moved(t, (size_t)count);
    t->worker->on_disk_s += t->last_moved - began;
    t->body_sent += count;
    if (t->body_sent == t->body_length)
        t->phase = AWAITING;
    return (size_t)count;
}

/* Called with a connection, before the request is sent. libcurl repeats a request whose reused
 * connection ended without an answer. The server may have executed it, so only requests that change
 * nothing are sent again. */
static int on_connected(void *argument, char *a, char *b, int c, int d) {
    struct transfer *t = argument;
    (void)a, (void)b, (void)c, (void)d;
    if (t->attempts++ && !t->is_head && strcmp(t->method, "GET") != 0) {
        t->error = "reset";
        return CURL_PREREQFUNC_ABORT;
    }
    begin_phase(t, t->body_length ? SENDING : AWAITING);
    t->connected = t->last_moved;
    t->worker->next_check = fmin(t->worker->next_check, t->connected); /* deadlines begin now */
    return CURL_PREREQFUNC_OK;
}

/* libcurl 7.88 itself opens sockets without CLOEXEC. */
static curl_socket_t open_socket(void *argument, curlsocktype purpose, struct curl_sockaddr *a) {
    (void)argument, (void)purpose;
    return socket(a->family, a->socktype | SOCK_CLOEXEC, a->protocol);
}

/* ---------------------------------------------------------------- a transfer in its worker */

/* Splits the lines "Name: value\n". Returns 0 if there is no memory. */
static int read_headers(struct transfer *t) {
    char *lines = strdup(t->header_lines), *rest = lines, *line;
    struct curl_slist *longer = NULL;
    while ((line = strsep(&rest, "\n")) != NULL && *line &&
           (longer = curl_slist_append(t->headers, line)) != NULL)
        t->headers = longer;
    free(lines);
    return longer != NULL;
}

static int set_options(struct transfer *t, CURL *easy) {
    int bad = 0;
#define SET(option, value) bad |= curl_easy_setopt(easy, CURLOPT_##option, value) != CURLE_OK
    SET(PRIVATE, t);
    SET(SHARE, t->worker->share); /* all transfers of the worker share TLS sessions */
    SET(ERRORBUFFER, t->detail);
    SET(NOSIGNAL, 1L);
    SET(URL, t->url);
    SET(PATH_AS_IS, 1L);
    SET(PROTOCOLS_STR, "http,https");
    SET(DISALLOW_USERNAME_IN_URL, 1L);
    SET(HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    SET(HTTPHEADER, t->headers);
    SET(TCP_NODELAY, 1L);
    SET(TCP_KEEPALIVE, 1L);
    SET(FRESH_CONNECT, (long)t->is_fresh);
    SET(MAXAGE_CONN, (long)MOST_IDLE_S);
    SET(CONNECTTIMEOUT_MS, (long)(fmin(t->connect_s, 1e6) * 1e3) + 1);
    SET(TIMEOUT_MS, (long)(fmin(t->total_s, 1e6) * 1e3));
    SET(QUICK_EXIT, 1L); /* or a cancelled name lookup would block the worker */
    SET(BUFFERSIZE, (long)(t->length > LARGE ? RECEIVED_AT_ONCE : SMALL_AT_ONCE));
    /* Empty: the environment's variables are ignored. */
    SET(PROXY, t->proxy ? t->proxy : "");
    SET(NOPROXY, "");
    SET(SUPPRESS_CONNECT_HEADERS, 1L);
    SET(SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
    SET(PROXY_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
    /* Peer and name are verified by default. libcurl's default directory would be trusted too, and
     * would prevent connections from sharing the parsed authorities. */
    SET(CAPATH, NULL);
    SET(PROXY_CAPATH, NULL);
    SET(CAINFO, t->ca_file);
    SET(PROXY_CAINFO, t->ca_file);
    SET(CA_CACHE_TIMEOUT, (long)CA_CACHED_S);
    SET(OPENSOCKETFUNCTION, open_socket);
    SET(PREREQFUNCTION, on_connected);
    SET(PREREQDATA, t);
    SET(HEADERFUNCTION, on_header);
    SET(HEADERDATA, t);
    SET(WRITEFUNCTION, on_body);
    SET(WRITEDATA, t);
    if (t->is_head)
        SET(NOBODY, 1L);
    else
        SET(CUSTOMREQUEST, t->method);
    if (t->has_body) { /* with POSTFIELDS, libcurl would add a Content-Type */
        SET(UPLOAD, 1L);
        SET(READFUNCTION, on_read);
        SET(READDATA, t);
        SET(INFILESIZE_LARGE, (curl_off_t)t->body_length);
        SET(UPLOAD_BUFFERSIZE, (long)SENT_AT_ONCE);
    }
#undef SET
    return !bad;
}

/* Copies the headers of the answer, with names in lower case. */
static void copy_head(struct transfer *t) {
    struct curl_header *each = NULL;
    FILE *stream = open_memstream(&t->head, &t->head_length);
    while (stream && (each = curl_easy_nextheader(t->easy, CURLH_HEADER, -1, each)) != NULL) {
        for (const char *c = each->name; *c; c++)
            putc_unlocked(*c >= 'A' && *c <= 'Z' ? *c + 'a' - 'A' : *c, stream);
        putc_unlocked(0, stream);
        fwrite(each->value, 1, strlen(each->value) + 1, stream);
    }
    if (stream == NULL || fclose(stream) != 0)
        t->error = "memory";
}

/* Determines a transfer's outcome. */
static void conclude(struct transfer *t, CURLcode code) {
    long request_size = 0, os_error = 0;
    int is_cancelled = atomic_load(&t->is_cancelled) && code == CURLE_ABORTED_BY_CALLBACK;
    curl_easy_getinfo(t->easy, CURLINFO_REQUEST_SIZE, &request_size);
    curl_easy_getinfo(t->easy, CURLINFO_OS_ERRNO, &os_error);
    curl_easy_getinfo(t->easy, CURLINFO_HTTP_CONNECTCODE, &t->proxy_status);
    if (code == CURLE_OK && t->status && !t->is_checked)
        t->error = refusal(t); /* there was no body */
    if (is_for_file(t) && (t->error == NULL || strncmp(t->error, "sink", 4) != 0)) {
        const char *before = t->error;
        if (flush(t) || before) /* bytes before an error count */
            t->error = before;
    }
    if (t->is_enough)
        code = CURLE_OK;
    if (code == CURLE_OK && is_for_file(t) && t->received < t->length) {
        code = CURLE_PARTIAL_FILE;
        /* A complete answer of another length than the object was decompressed on the way. */
        if (t->status == 200 && t->size >= 0 && !t->error && header(t, "transfer-encoding"))
            t->error = "size";
    }
    /* libcurl accepts headers that are cut off by the connection's end. */
    if (!t->status && (code == CURLE_OK || code == CURLE_PARTIAL_FILE))
        code = CURLE_GOT_NOTHING;
    /* A refusal counts, even if its document or the upload broke off. */
    if (t->status >= 300 && !is_cancelled) {
        code = CURLE_OK;
        t->error = NULL;
    }
    if (t->status)
        copy_head(t);
    if (!is_for_file(t))
        t->received = (int64_t)t->content_size;
    if (is_cancelled)
        t->error = "cancelled";
    t->code = code;
    if (t->error == NULL && code != CURLE_OK)
        t->error_number = (int)os_error;
    /* The size includes a CONNECT, which comes before `connected`. */
    int is_sent = t->connected > 0 && request_size > 0;
    t->may_have_been_executed = is_sent && (t->error != NULL || code != CURLE_OK);
}

/* Closes the sink, and removes a file that was created and that Python has not taken. */
static void close_sink(struct transfer *t) {
    if (t->sink_fd >= 0 && t->path != NULL)
        unlink(t->path);
    if (t->sink_fd >= 0)
        close(t->sink_fd);
    t->sink_fd = -1;
}

static void close_body(struct transfer *t) {
    if (t->body_fd >= 0)
        close(t->body_fd);
    t->body_fd = -1;
}

/* Ends a transfer that is over (curl_multi_info_read), too late or cancelled. */
static void finish(struct worker *worker, struct transfer *t, CURLcode code) {
    if (t->easy != NULL) {
        conclude(t, code);
        /* Closes the connection of an unfinished transfer; no callback follows. */
        curl_multi_remove_handle(worker->multi, t->easy);
        curl_easy_cleanup(t->easy);
        t->easy = NULL;
    }
    if (is_for_file(t)) {
        free(t->content);
        t->content = NULL;
        t->content_size = 0;
        t->has_news = t->received > t->shown || t->sum_count > t->sums_shown;
    }
    close_body(t);
    if (t->path == NULL || t->error != NULL || t->code != CURLE_OK)
        close_sink(t);
    t->last_byte = now_s();
    t->previous->next = t->next;
    t->next->previous = t->previous;
    t->next = worker->completed;
    worker->completed = t;
    atomic_fetch_sub(&worker->load, 1);
}

static void begin(struct worker *worker, struct transfer *t) {
    struct transfer *ring = &worker->active;
    t->next = ring;
    t->previous = ring->previous;
    ring->previous->next = t;
    ring->previous = t;
    t->easy = curl_easy_init(); /* 2 us */
    if (t->easy == NULL || !read_headers(t) || !set_options(t, t->easy) ||
        curl_multi_add_handle(worker->multi, t->easy) != CURLM_OK) {
        t->error = "memory";
        finish(worker, t, CURLE_OUT_OF_MEMORY);
    }
}

/* Returns the error of a transfer that is too slow, or NULL; lowers `*next` to the transfer's next
 * deadline. libcurl itself checks the deadlines for connecting and for the whole transfer. */
static const char *lateness(struct transfer *t, double now, double *next) {
    if (t->phase == CONNECTING)
        return NULL;
    if (now >= t->last_moved + t->silence_s)
        return "timeout";
    *next = fmin(*next, t->last_moved + t->silence_s);
    if (t->phase == AWAITING || t->least_rate <= 0)
        return NULL;
    if (now >= t->window_began + t->window_s) {
        if ((double)t->window_moved < t->least_rate * (now - t->window_began))
            return "low-speed";
        t->window_began = now;
        t->window_moved = 0;
    }
    *next = fmin(*next, t->window_began + t->window_s);
    return NULL;
}

static void check_deadlines(struct worker *worker) {
    double now = now_s(), disk_s = worker->on_disk_s > STALLED_S ? worker->on_disk_s : 0;
    if (now < worker->next_check && !disk_s)
        return;
    worker->next_check = now + LONGEST_WAIT_S;
    for (struct transfer *t = worker->active.next, *after; t != &worker->active; t = after) {
        after = t->next;
        /* Servers are not blamed for the time in which the worker waited for the disk. */
        t->last_moved = fmin(t->last_moved + disk_s, now);
        t->window_began = fmin(t->window_began + disk_s, now);
        const char *error = lateness(t, now, &worker->next_check);
        if (error != NULL) {
            t->error = error;
            finish(worker, t, CURLE_OPERATION_TIMEDOUT);
        }
    }
}

static void cancel(struct worker *worker, int all) {
    for (struct transfer *t = worker->active.next, *after; t != &worker->active; t = after) {
        after = t->next;
        if (all)
            atomic_store(&t->is_cancelled, 1);
        if (atomic_load(&t->is_cancelled))
            finish(worker, t, CURLE_ABORTED_BY_CALLBACK);
    }
}

/* Begins queued transfers and ends cancelled ones; returns 0 if the worker is to end. */
static int take_work(struct worker *worker) {
    pthread_mutex_lock(&worker->mutex);
    struct transfer *t = worker->queue, *after;
    int has_cancelled = worker->has_cancelled, is_stopping = worker->is_stopping;
    worker->queue = NULL;
    worker->queue_end = &worker->queue;
    worker->has_cancelled = 0;
    pthread_mutex_unlock(&worker->mutex);
    for (; t != NULL; t = after) {
        after = t->next;
        begin(worker, t);
    }
    if (has_cancelled || is_stopping)
        cancel(worker, is_stopping);
    return !is_stopping;
}

static void await_work(struct worker *worker) {
    double wait_s = fmin(fmax(worker->next_check - now_s(), 0), LONGEST_WAIT_S);
    pthread_mutex_lock(&worker->mutex);
    worker->is_asleep = !worker->queue && !worker->has_cancelled && !worker->is_stopping;
    int is_asleep = worker->is_asleep;
    pthread_mutex_unlock(&worker->mutex);
    if (!is_asleep)
        return;
    /* A wake-up before the call makes it return at once. */
    curl_multi_poll(worker->multi, NULL, 0, (int)ceil(wait_s * 1e3), NULL);
    pthread_mutex_lock(&worker->mutex);
    worker->is_asleep = 0;
    pthread_mutex_unlock(&worker->mutex);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    for (int goes_on = 1; goes_on;) {
        int ignored;
        CURLMsg *message;
        struct transfer *t;
        worker->on_disk_s = 0;
        goes_on = take_work(worker);
        curl_multi_perform(worker->multi, &ignored);
        while ((message = curl_multi_info_read(worker->multi, &ignored)) != NULL) {
            CURLcode code = message->data.result; /* `message` does not outlive the handle */
            curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, (char **)&t);
            finish(worker, t, code);
        }
        check_deadlines(worker);
        if (worker->completed != NULL)
            publish(worker->engine, worker->completed, NULL);
        worker->completed = NULL;
        if (goes_on)
            await_work(worker);
    }
    return NULL;
}

/* ---------------------------------------------------------------- Python: a transfer */

static PyObject *transfer_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    struct transfer *t = (struct transfer *)type->tp_alloc(type, 0);
    (void)arguments, (void)names;
    if (t != NULL)
        t->sink_fd = t->body_fd = -1;
    return (PyObject *)t;
}

static void transfer_dealloc(struct transfer *t) {
    PyTypeObject *type = Py_TYPE(t);
    PyBuffer_Release(&t->body);
    curl_slist_free_all(t->headers);
    close_sink(t);
    close_body(t);
    Py_XDECREF(t->request);
    free(t->content), free(t->sums), free(t->head);
    type->tp_free(t);
    Py_DECREF(type);
}

static int duplicate(int fd, int *copy) {
    *copy = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    return fd < 0 || *copy >= 0;
}

/* Parses a request as flattened by engine.py: with body, sink, route and deadlines. */
static int read_request(struct transfer *t, PyObject *request) {
    int sink_fd, body_fd;
    if (!PyArg_ParseTuple(request, "ssyz*iLLLiLLLzLpzzzdddddLp", &t->method, &t->url,
                          &t->header_lines, &t->body, &body_fd, &t->body_offset, &t->body_length,
                          &t->limit, &sink_fd, &t->sink_offset, &t->start, &t->length, &t->etag,
                          &t->size, &t->with_sums, &t->path, &t->proxy, &t->ca_file,
                          &t->connect_s, &t->silence_s, &t->least_rate, &t->window_s,
                          &t->total_s, &t->progress, &t->is_fresh))
        return 0;
    t->request = Py_NewRef(request);
    if (t->sink_offset < 0 || t->start < 0 || t->length < 0 ||
        t->length > INT64_MAX - t->sink_offset || t->length > INT64_MAX - t->start ||
        (t->path != NULL && t->length > GATHERED)) {
        PyErr_SetString(PyExc_ValueError, "the range of a sink");
        return 0;
    }
    if (t->body.obj != NULL)
        t->body_length = t->body.len;
    t->has_body = t->body.obj != NULL || body_fd >= 0;
    t->is_head = strcmp(t->method, "HEAD") == 0;
    if (t->with_sums) {
        t->sums = calloc((size_t)(t->length / SUM_BLOCK) + 2, sizeof *t->sums);
        if (t->sums == NULL)
            return PyErr_NoMemory() != NULL;
    }
    if (!duplicate(body_fd, &t->body_fd) || !duplicate(sink_fd, &t->sink_fd)) {
        PyErr_SetFromErrno(PyExc_OSError);
        return 0;
    }
    return 1;
}

/* Returns the descriptor of the created file, or -1. The transfer must be complete. */
static PyObject *transfer_take_file(struct transfer *t, PyObject *unused) {
    int fd = t->path != NULL ? t->sink_fd : -1;
    (void)unused;
    t->sink_fd = t->path != NULL ? -1 : t->sink_fd;
    return PyLong_FromLong(fd);
}

static PyMethodDef transfer_methods[] = {
    {"take_file", (PyCFunction)transfer_take_file, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef transfer_members[] = {
    {"status", T_INT, offsetof(struct transfer, status), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot transfer_slots[] = {
    {Py_tp_new, transfer_new},
    {Py_tp_dealloc, transfer_dealloc},
    {Py_tp_methods, transfer_methods},
    {Py_tp_members, transfer_members},
    {0, NULL},
};

static PyType_Spec transfer_spec = {
    "fusefs.store.engine._engine.Transfer", sizeof(struct transfer), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, transfer_slots};

/* ---------------------------------------------------------------- Python: the engine */

/* Chooses the least loaded worker for small or for large bodies; the first of equals, so that a few
 * requests reuse a few connections. */
static struct worker *choose(Engine *engine, const struct transfer *t) {
    int is_large = t->length > LARGE || t->body_length > LARGE;
    int first = is_large ? engine->small_count : 0;
    int stop = is_large ? engine->worker_count : engine->small_count;
    struct worker *chosen = &engine->workers[first];
    for (int i = first + 1; i < stop; i++)
        if (atomic_load(&engine->workers[i].load) < atomic_load(&chosen->load))
            chosen = &engine->workers[i];
    return chosen;
}

/* Tells a worker to begin a transfer (`added`), to look for cancelled ones, or to end. */
static void tell(struct worker *worker, struct transfer *added, int is_cancelled, int is_end) {
    pthread_mutex_lock(&worker->mutex);
    if (added != NULL) {
        *worker->queue_end = added;
        worker->queue_end = &added->next;
    }
    worker->has_cancelled |= is_cancelled;
    worker->is_stopping |= is_end;
    int is_asleep = worker->is_asleep;
    worker->is_asleep = 0; /* one wake-up is enough */
    pthread_mutex_unlock(&worker->mutex);
    if (is_asleep)
        curl_multi_wakeup(worker->multi);
}

static PyObject *engine_submit(Engine *engine, PyObject *arguments) {
    struct transfer *t;
    PyObject *request;
    if (!PyArg_ParseTuple(arguments, "O!O!", engine->transfer_type, &t, &PyTuple_Type, &request))
        return NULL;
    if (engine->workers == NULL || t->request != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is closed, or the transfer is used");
        return NULL;
    }
    if (!read_request(t, request))
        return NULL;
    Py_INCREF(t);
    t->submitted = now_s();
    t->worker = choose(engine, t);
    atomic_fetch_add(&t->worker->load, 1);
    tell(t->worker, t, 0, 0);
    Py_RETURN_NONE;
}

static PyObject *engine_cancel(Engine *engine, PyObject *argument) {
    struct transfer *t = (struct transfer *)argument;
    if (PyObject_TypeCheck(argument, engine->transfer_type) && engine->workers && t->worker) {
        atomic_store(&t->is_cancelled, 1);
        tell(t->worker, NULL, 1, 0);
    }
    Py_RETURN_NONE;
}

static double since_submitted(const struct transfer *t, double moment) {
    return moment ? moment - t->submitted : 0;
}

static PyObject *completion_of(const struct transfer *t) {
    return Py_BuildValue(
        "iy#y#LziilNNddd", t->status, t->head ? t->head : "", (Py_ssize_t)t->head_length,
        t->content ? t->content : "", (Py_ssize_t)t->content_size, (long long)t->received,
        t->error, (int)t->code, t->error_number, t->proxy_status,
        PyUnicode_DecodeUTF8(t->detail, (Py_ssize_t)strlen(t->detail), "replace"),
        PyBool_FromLong(t->may_have_been_executed), since_submitted(t, t->connected),
        since_submitted(t, t->first_byte), since_submitted(t, t->last_byte));
}

/* Appends `item`, which may be NULL, and consumes the reference to it. */
static int add(PyObject *list, PyObject *item) {
    int is_added = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return is_added;
}

/* Returns the completed transfers, and those with progress, each with its new sums. */
static PyObject *engine_collect(Engine *engine, PyObject *unused) {
    eventfd_t ignored;
    PyObject *completed = PyList_New(0), *progressed = PyList_New(0);
    int is_bad = completed == NULL || progressed == NULL;
    (void)unused;
    /* Before the lists are taken: a later transfer writes the eventfd again. */
    eventfd_read(engine->eventfd, &ignored);
    pthread_mutex_lock(&engine->mutex);
    struct transfer *done = engine->completed, *listed = engine->listed, *after;
    engine->completed = engine->listed = NULL;
    pthread_mutex_unlock(&engine->mutex);
    /* Transfers that complete meanwhile are released by the next call. */
    for (struct transfer *t = listed; t != NULL; t = after) {
        pthread_mutex_lock(&engine->mutex);
        long long shown = t->shown;
        size_t first = t->sums_taken, stop = t->sums_taken = t->sums_shown;
        after = t->next_listed;
        t->is_listed = 0;
        pthread_mutex_unlock(&engine->mutex);
        /* A reported sum does not change any more. */
        Py_ssize_t size = (Py_ssize_t)((stop - first) * sizeof *t->sums);
        const char *sums = size ? (const char *)(t->sums + first) : "";
        is_bad = is_bad || !add(progressed, Py_BuildValue("OLy#", t, shown, sums, size));
    }
    for (struct transfer *t = done; t != NULL; t = after) {
        after = t->next;
        is_bad = is_bad || !add(completed, Py_BuildValue("ON", t, completion_of(t)));
        Py_DECREF(t);
    }
    if (!is_bad)
        return Py_BuildValue("NN", completed, progressed);
    Py_XDECREF(completed);
    Py_XDECREF(progressed);
    return NULL;
}

/* Cancels all transfers and joins the threads; the completions can then be collected. */
static PyObject *engine_close(Engine *engine, PyObject *unused) {
    struct worker *workers = engine->workers;
    (void)unused;
    engine->workers = NULL;
    for (int i = 0; workers != NULL && i < engine->worker_count; i++)
        tell(&workers[i], NULL, 0, 1);
    Py_BEGIN_ALLOW_THREADS;
    for (int i = 0; workers != NULL && i < engine->worker_count; i++) {
        pthread_join(workers[i].thread, NULL);
        /* Not by the worker, which may end while `tell` is about to wake it. */
        curl_multi_cleanup(workers[i].multi); /* closes the connections */
        curl_share_cleanup(workers[i].share);
        pthread_mutex_destroy(&workers[i].mutex);
    }
    Py_END_ALLOW_THREADS;
    free(workers);
    Py_RETURN_NONE;
}

static int start_worker(Engine *engine, struct worker *worker, long max_connections) {
    worker->engine = engine;
    worker->active.next = worker->active.previous = &worker->active;
    worker->queue_end = &worker->queue;
    worker->multi = curl_multi_init();
    worker->share = curl_share_init();
    pthread_mutex_init(&worker->mutex, NULL);
    if (worker->multi == NULL || worker->share == NULL)
        return 0;
    /* Only one thread uses the share handle, so it needs no locks. */
    curl_share_setopt(worker->share, CURLSHOPT_SHARE, CURL_LOCK_DATA_SSL_SESSION);
    curl_multi_setopt(worker->multi, CURLMOPT_MAXCONNECTS, max_connections);
    return pthread_create(&worker->thread, NULL, work, worker) == 0;
}

static int engine_init(Engine *engine, PyObject *arguments, PyObject *unused) {
    int small, large, max_connections, is_bad;
    PyObject *transfer_type;
    sigset_t all, before;
    (void)unused;
    if (!PyArg_ParseTuple(arguments, "iiiO!", &small, &large, &max_connections, &PyType_Type,
                          &transfer_type))
        return -1;
    if (small < 1 || large < 1 || engine->eventfd >= 0) {
        PyErr_SetString(PyExc_ValueError, "the number of workers");
        return -1;
    }
    engine->transfer_type = (PyTypeObject *)Py_NewRef(transfer_type);
    engine->eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&engine->mutex, NULL);
    engine->small_count = small;
    engine->workers = calloc((size_t)(small + large), sizeof *engine->workers);
    is_bad = engine->eventfd < 0 || engine->workers == NULL;
    /* Threads inherit the mask: Python's main thread handles signals. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; i < small + large && !is_bad; i++) {
        is_bad = !start_worker(engine, &engine->workers[i], max_connections);
        engine->worker_count += !is_bad;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (is_bad)
        PyErr_SetString(PyExc_OSError, "no memory, threads or descriptors for the engine");
    return is_bad ? -1 : 0;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    Engine *engine = (Engine *)type->tp_alloc(type, 0);
    (void)arguments, (void)names;
    if (engine != NULL)
        engine->eventfd = -1;
    return (PyObject *)engine;
}

static void engine_dealloc(Engine *engine) {
    PyTypeObject *type = Py_TYPE(engine);
    Py_XDECREF(engine_close(engine, NULL));
    for (struct transfer *t = engine->completed, *after; t != NULL; t = after) {
        after = t->next;
        Py_DECREF(t);
    }
    if (engine->eventfd >= 0)
        close(engine->eventfd);
    Py_XDECREF(engine->transfer_type);
    type->tp_free(engine);
    Py_DECREF(type);
}

static PyMethodDef engine_methods[] = {
    {"submit", (PyCFunction)engine_submit, METH_VARARGS, NULL},
    {"cancel", (PyCFunction)engine_cancel, METH_O, NULL},
    {"collect", (PyCFunction)engine_collect, METH_NOARGS, NULL},
    {"close", (PyCFunction)engine_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef engine_members[] = {
    {"eventfd", T_INT, offsetof(Engine, eventfd), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},         {Py_tp_init, engine_init}, {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods}, {Py_tp_members, engine_members}, {0, NULL},
};

static PyType_Spec engine_spec = {
    "fusefs.store.engine._engine.Engine", sizeof(Engine), 0, Py_TPFLAGS_DEFAULT, engine_slots};

static int module_exec(PyObject *module) {
    /* Thread-safe since libcurl 7.84; only the first call has an effect. */
    if (curl_global_init(CURL_GLOBAL_ALL) != CURLE_OK) {
        PyErr_SetString(PyExc_ImportError, "libcurl can't be initialised");
        return -1;
    }
    crc_prepare();
    PyObject *engine = PyType_FromModuleAndSpec(module, &engine_spec, NULL);
    PyObject *transfer = PyType_FromModuleAndSpec(module, &transfer_spec, NULL);
    int is_bad = engine == NULL || PyModule_AddObjectRef(module, "Engine", engine) < 0 ||
                 transfer == NULL || PyModule_AddObjectRef(module, "Transfer", transfer) < 0;
    Py_XDECREF(engine);
    Py_XDECREF(transfer);
    return is_bad ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_engine", .m_slots = module_slots};

PyMODINIT_FUNC PyInit__engine(void) {
    return PyModuleDef_Init(&module);
}

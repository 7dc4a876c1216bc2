// The interpreter of a session in JavaScript. Code is a script, of which `const` and `let` stay; what awaits something at
// its top level is run by a REPL of Node's own, without its terminal, which knows how to. What it is asked and replies is
// as in python.py.
'use strict';

const fs = require('fs');
const net = require('net');
const os = require('os');
const path = require('path');
const repl = require('repl');
const util = require('util');
const vm = require('vm');
const { PassThrough } = require('stream');

const TEXT_MAX = 64 << 10;
const TRACEBACK_MAX = 16 << 10;
const VALUE_MAX = 4 << 10;
const VARIABLES_MAX = 500;
const INTERRUPTED = 'ERR_SCRIPT_EXECUTION_INTERRUPTED';

module.exports = function serve(requests, replies) {
  const server = repl.start({
    prompt: '',
    input: new PassThrough(),
    output: new PassThrough(),
    terminal: false,
    useGlobal: true,
  });
  const known = new Set(Object.getOwnPropertyNames(globalThis));
  const declared = new Set();
  let calls = 0;
  let settle = null; // of the call that runs
  let missed = false; // an interrupt that came while none did
  let stdin = null;

  function send(head, data = '') {
    const bytes = Buffer.concat([Buffer.from(JSON.stringify(head) + '\n'), Buffer.from(data)]);
    for (let at = 0; at < bytes.length; ) at += fs.writeSync(replies, bytes, at);
  }

  // What is thrown after its call has ended has nobody to go to.
  function failed(error) {
    if (settle !== null) settle(error);
    else process.stderr.write(`${explain(error).traceback}\n`);
  }

  // Code that runs is ended by Node itself; this is for what is being awaited.
  function interrupted() {
    if (settle === null) missed = true;
    else settle(Object.assign(new Error('interrupted'), { code: INTERRUPTED }));
  }

  function feed(text) {
    fs.closeSync(0);
    stdin = null;
    if (text === null) {
      fs.openSync('/dev/null', 'r'); // the lowest number that is free: 0
      return;
    }
    const file = path.join(fs.mkdtempSync(path.join(os.tmpdir(), 'stdin-')), 'data');
    fs.writeFileSync(file, Buffer.from(text, 'base64'));
    fs.openSync(file, 'r');
    fs.rmSync(path.dirname(file), { recursive: true });
  }

  function evaluate(code, name) {
    return new Promise((resolve, reject) => {
      settle = reject;
      if (missed) {
        missed = false;
        interrupted();
        return;
      }
      const script = compiled(code, name);
      if (script instanceof vm.Script) resolve(script.runInThisContext({ breakOnSigint: true, displayErrors: false }));
      else if (!/\bawait\b/.test(code)) throw script;
      else server.eval(code, server.context, name, (error, value) => (error ? reject(error) : resolve(value)));
    }).finally(() => {
      settle = null;
    });
  }

  async function run(request) {
    const name = `<call ${++calls}>`;
    feed(request.stdin);
    for (const [, word] of request.code.matchAll(/\b(?:const|let|class)\s+([\p{ID_Start}$_][\p{ID_Continue}$]*)/gu))
      declared.add(word);
    const value = await evaluate(request.code, name);
    if (value === undefined) return;
    const text = Buffer.from(util.inspect(value));
    const data = text.subarray(0, TEXT_MAX);
    const head = { token: request.token, value: 1, kind: 'value', type: 'text/plain' };
    send({ ...head, cut: data.length < text.length, size: data.length }, data);
  }

  async function list(request) {
    const names = Object.getOwnPropertyNames(globalThis).filter((name) => !known.has(name));
    for (const name of [...new Set([...names, ...declared])].slice(0, VARIABLES_MAX)) {
      let value;
      try {
        value = await evaluate(name, '<variables>');
      } catch {
        continue; // declared in an inner block, or by code that was never run
      }
      const kind = value === null ? 'null' : typeof value;
      const type = (kind === 'object' && value.constructor && value.constructor.name) || kind;
      const text = util.inspect(value, { depth: 0, maxArrayLength: 10, maxStringLength: 80, breakLength: Infinity });
      const about = { name: name.slice(0, 200), type: String(type).slice(0, 200), text: text.slice(0, 200), size: 0 };
      send({ token: request.token, variable: about });
    }
  }

  async function handle(request) {
    if (request.interrupted) {
      // An interrupt of the call before may have come after its end: it is not for this one.
      missed = false;
      send({ token: request.token, begun: true });
    }
    let end = null;
    try {
      await (request.op === 'run' ? run : list)(request);
    } catch (error) {
      end = explain(error);
    }
    send({ token: request.token, end });
  }

  process.on('SIGINT', interrupted);
  process.on('uncaughtException', failed);
  process.on('unhandledRejection', failed);
  if (server._domain) {
    server._domain.removeAllListeners('error');
    server._domain.on('error', failed);
  }
  Object.defineProperty(process, 'stdin', {
    configurable: true,
    get: () => (stdin ??= new fs.ReadStream(null, { fd: 0, autoClose: false })),
  });

  feed(null);
  send({ ready: process.version });
  const socket = new net.Socket({ fd: requests, readable: true, writable: false });
  let rest = '';
  let turn = Promise.resolve();
  socket.setEncoding('utf8');
  socket.on('data', (text) => {
    const lines = (rest + text).split('\n');
    rest = lines.pop();
    for (const line of lines) turn = turn.then(() => handle(JSON.parse(line)));
  });
  socket.on('end', () => process.exit(0));
};

// A script, or the error that says why it is none. What looks like an object is one, as in a REPL.
function compiled(code, filename) {
  const importModuleDynamically = vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER;
  let problem = null;
  for (const text of /^\s*\{.*\}\s*$/s.test(code) ? [`(${code})`, code] : [code]) {
    try {
      return new vm.Script(text, { filename, importModuleDynamically });
    } catch (error) {
      problem = error;
    }
  }
  return problem;
}

function explain(error) {
  if (error instanceof repl.Recoverable) error = error.err;
  if (!util.types.isNativeError(error)) {
    const text = util.inspect(error).slice(0, VALUE_MAX);
    return { name: typeof error, value: text, traceback: `Uncaught ${text}` };
  }
  if (error.code === INTERRUPTED) return { name: 'Interrupted', value: '', traceback: 'Interrupted' };
  const lines = String(error.stack).split('\n');
  const own = lines.filter((line) => !/^ +at (.*(node:|<session>)|new Promise \(<anonymous>\)$)/.test(line)).join('\n');
  const name = String(error.name).slice(0, 200);
  return { name, value: String(error.message).slice(0, VALUE_MAX), traceback: own.slice(0, TRACEBACK_MAX) };
}
